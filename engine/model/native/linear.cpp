// Matrix products in bfloat16 by AMX, the matrix unit of newer Intel processors.
//
// A tile register holds 16 rows of 64 bytes; one instruction multiplies a tile of 16 rows x 32 inputs by one of
// 32 inputs x 16 outputs and adds the 256 sums in float. Weights are laid out once, tile after tile, in the order in
// which a thread reads them, since reading them is what a decode step waits for; and every tile that was read is
// used for up to 32 rows.

#include <algorithm>

#include "numbers.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

static const long IN = 32, OUT = 32, ROWS = 32;  // of a block: 2 x 2 tiles of sums, 2 of inputs, 2 of weights
static const long TILE = 16 * 32;                // numbers in a tile of weights
static const long TURN = 16;                     // most blocks of outputs that a thread takes at a time: its cache holds them

// Sums are in tiles 0 to 3, inputs in 4 and 5, weights in 6 and 7; upper and lower: rows of the two tiles of inputs.
static void configure(int upper, int lower) {
    struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } tiles;
    const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int i = 0; i < 8; i++) tiles.rows[i] = rows[i], tiles.bytes[i] = rows[i] ? 64 : 0;
    _tile_loadconfig(&tiles);
}

// sums [32][OUT] = x @ weights for the rows configured; x: [rows][stride]; weights: [2][steps] tiles.
// FROM_MEMORY: the weights are not in a cache yet.
template <bool HAS_LOWER, bool FROM_MEMORY>
static inline void multiply(const bfloat16* x, long stride, const bfloat16* weights, long steps, float* sums) {
    const bfloat16* other = weights + steps * TILE;
    const long row_bytes = stride * sizeof(bfloat16), sum_bytes = OUT * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    if (HAS_LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long step = 0; step < steps; step++) {
        if (FROM_MEMORY)  // two tiles on: the hardware stops looking ahead at every page's end
            for (long i = 0; i < TILE; i += 32) {
                __builtin_prefetch(weights + (step + 2) * TILE + i);
                __builtin_prefetch(other + (step + 2) * TILE + i);
            }
        _tile_loadd(4, x + step * IN, row_bytes);
        _tile_stream_loadd(6, weights + step * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, other + step * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (HAS_LOWER) {
            _tile_loadd(5, x + 16 * stride + step * IN, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + 16, sum_bytes);
    if (HAS_LOWER) {
        _tile_stored(2, sums + 16 * OUT, sum_bytes);
        _tile_stored(3, sums + 16 * OUT + 16, sum_bytes);
    }
}

// Whether the system lets this process use the tile registers, which it must ask for. Call once, before `glass_linear`.
extern "C" int glass_has_amx() {
    const int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

// out [rows][outputs] = x [rows][inputs] @ weights + bias, bias may be null. weights: [outputs / 16][inputs / 32] tiles,
// in each of which inputs 2k and 2k + 1 of an output lie side by side: [16][16][2].
template <class Out>
static void linear(const bfloat16* x, const bfloat16* weights, const bfloat16* bias, Out* out, long rows, long inputs,
                   long outputs, int threads) {
    const long steps = inputs / IN, blocks = outputs / OUT;
    const long rounds = (blocks + threads * TURN - 1) / (threads * TURN);
    const long turn_blocks = (blocks + threads * rounds - 1) / (threads * rounds);  // so that all threads end together
#pragma omp parallel num_threads(threads)
    {
        float sums[ROWS * OUT];
#pragma omp for schedule(dynamic, 1)
        for (long turn = 0; turn < blocks; turn += turn_blocks)
            for (long row = 0; row < rows; row += ROWS) {
                const int here = std::min(ROWS, rows - row), upper = std::min(16, here), lower = here - upper;
                configure(upper, lower);
                const auto product = row == 0 ? (lower ? multiply<true, true> : multiply<false, true>)
                                              : (lower ? multiply<true, false> : multiply<false, false>);
                for (long block = turn; block < std::min(turn + turn_blocks, blocks); block++) {
                    product(x + row * inputs, inputs, weights + block * steps * 2 * TILE, steps, sums);
                    float added[OUT];
                    for (int i = 0; i < OUT; i++) added[i] = bias ? to_float(bias[block * OUT + i]) : 0;
                    for (int r = 0; r < here; r++)
#pragma omp simd
                        for (int i = 0; i < OUT; i++)
                            put(out[(row + r) * outputs + block * OUT + i], sums[r * OUT + i] + added[i]);
                }
            }
        _tile_release();
    }
}

extern "C" void glass_linear(const bfloat16* x, const bfloat16* weights, const bfloat16* bias, void* out,
                             int out_is_float, long rows, long inputs, long outputs, int threads) {
    if (out_is_float) linear(x, weights, bias, (float*)out, rows, inputs, outputs, threads);
    else linear(x, weights, bias, (bfloat16*)out, rows, inputs, outputs, threads);
}

#else
extern "C" int glass_has_amx() { return 0; }
#endif
