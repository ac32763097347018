// Attention over the paged cache, where it lies: nothing is gathered, and nobody is padded to another's length.
//
// A tile of query rows of one request walks the request's block table, 16 keys at a time, and rescales what it has
// whenever a larger score turns up (online softmax: Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022;
// over blocks: PagedAttention, Kwon et al. 2023). Query heads that share a key head are rows of the same tile.

#include <algorithm>
#include <vector>

#include "numbers.h"

static const long KEYS = 16;  // at once: as many as a vector register has floats

// The keys or values of up to 16 tokens that lie in one block, of one head.
template <class T>
struct Chunk {
    const T* first;
    long count, stride;
    const T* operator[](long k) const { return first + std::min(k, count - 1) * stride; }  // never beyond
};

// What a tile has seen so far. Rows: query heads of query tokens. q, seen: [rows][d]; weights: [rows][KEYS].
template <class T>
struct Tile {
    std::vector<T> q, scratch;
    std::vector<float> seen, weights, largest, total;
    Tile(long rows, long d)
        : q(rows * d), scratch(KEYS * d), seen(rows * d), weights(rows * KEYS), largest(rows), total(rows) {}
};

// scores[k] = q . keys[k], for all 16.
template <int D, class T>
static inline void dot(const T* q, const Chunk<T>& keys, long d, float* scores) {
    for (long k = 0; k < KEYS; k++) {
        const T* key = keys[k];
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (long i = 0; i < (D ? D : d); i++) score += to_float(q[i]) * to_float(key[i]);
        scores[k] = score;
    }
}

// Prepares values for `add_weighted`.
template <int D, class T>
static inline void arrange(const Chunk<T>& values, long d, T* arranged) {
    for (long k = 0; k < KEYS; k++) memcpy(arranged + k * d, values[k], d * sizeof(T));
}

// seen += the sum of weights[k] * values[k].
template <int D, class T>
static inline void add_weighted(const float* weights, const T* arranged, long d, float* seen) {
    for (long k = 0; k < KEYS; k++)
#pragma omp simd
        for (long i = 0; i < (D ? D : d); i++) seen[i] += weights[k] * to_float(arranged[k * d + i]);
}

#ifdef __AVX512BF16__
#include <immintrin.h>

// The same for bfloat16 by instructions that multiply and add pairs of it, for heads of whole registers.

static inline __m512bh pairs(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// The 16 sums over 16 registers' floats, by halving how many registers there are.
static inline __m512 sums(__m512 s[KEYS]) {
    for (int i = 0; i < 8; i++)
        s[i] = _mm512_add_ps(_mm512_unpacklo_ps(s[2 * i], s[2 * i + 1]), _mm512_unpackhi_ps(s[2 * i], s[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(s[2 * i]), b = _mm512_castps_pd(s[2 * i + 1]);
        s[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int left = 2; left; left /= 2)
        for (int i = 0; i < left; i++)
            s[i] = _mm512_add_ps(_mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0xdd));
    return s[0];
}

template <int D>
static inline void dot_bf16(const bfloat16* q, const Chunk<bfloat16>& keys, float* scores) {
    __m512 s[KEYS];
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; k++) {
        s[k] = _mm512_setzero_ps();
        const bfloat16* key = keys[k];
#pragma GCC unroll 4
        for (int i = 0; i < D; i += 32) s[k] = _mm512_dpbf16_ps(s[k], pairs(q + i), pairs(key + i));
    }
    _mm512_storeu_ps(scores, sums(s));
}

// Values of tokens 2k and 2k + 1 take turns: what a product of pairs adds up are two tokens.
template <int D>
static inline void arrange_bf16(const Chunk<bfloat16>& values, bfloat16* arranged) {
    const __m512i turns = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,
                                           0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
    const __m512i other = _mm512_add_epi16(turns, _mm512_set1_epi16(16));
    for (int k = 0; k < KEYS; k += 2)
        for (int i = 0; i < D; i += 32) {
            __m512i even = _mm512_loadu_si512(values[k] + i), odd = _mm512_loadu_si512(values[k + 1] + i);
            bfloat16* to = arranged + k * D + 2 * i;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, turns, odd));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, other, odd));
        }
}

template <int D>
static inline void add_weighted_bf16(const float* weights, const bfloat16* arranged, float* seen) {
    __m512 s[D / 16];
    int32_t w[KEYS / 2];
    _mm256_storeu_si256((__m256i*)w, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights)));
#pragma GCC unroll 8
    for (int i = 0; i < D / 16; i++) s[i] = _mm512_loadu_ps(seen + 16 * i);
#pragma GCC unroll 8
    for (int k = 0; k < KEYS / 2; k++)
#pragma GCC unroll 8
        for (int i = 0; i < D / 16; i++)
            s[i] = _mm512_dpbf16_ps(s[i], (__m512bh)_mm512_set1_epi32(w[k]), pairs(arranged + 2 * (k * D + 16 * i)));
#pragma GCC unroll 8
    for (int i = 0; i < D / 16; i++) _mm512_storeu_ps(seen + 16 * i, s[i]);
}

template <> inline void dot<64>(const bfloat16* q, const Chunk<bfloat16>& keys, long, float* scores) {
    dot_bf16<64>(q, keys, scores);
}
template <> inline void dot<128>(const bfloat16* q, const Chunk<bfloat16>& keys, long, float* scores) {
    dot_bf16<128>(q, keys, scores);
}
template <> inline void arrange<64>(const Chunk<bfloat16>& values, long, bfloat16* arranged) {
    arrange_bf16<64>(values, arranged);
}
template <> inline void arrange<128>(const Chunk<bfloat16>& values, long, bfloat16* arranged) {
    arrange_bf16<128>(values, arranged);
}
template <> inline void add_weighted<64>(const float* weights, const bfloat16* arranged, long, float* seen) {
    add_weighted_bf16<64>(weights, arranged, seen);
}
template <> inline void add_weighted<128>(const float* weights, const bfloat16* arranged, long, float* seen) {
    add_weighted_bf16<128>(weights, arranged, seen);
}
#endif

// queries [rows][stride]; out [rows][heads * head_dim]; cache [slots][2][kv_heads][head_dim];
// tables [requests][table_width]; tiles [num_tiles][4]: request, first row, rows, tokens that the first row sees
// (each next row sees one more). D: the head's width if the compiler is to know it, else 0.
template <class T, int D>
static void attend(const T* queries, long stride, T* out, const T* cache, const int64_t* tables, long table_width,
                   const int64_t* tiles, long num_tiles, long most_rows, long heads, long kv_heads, long head_dim,
                   long block_size, int threads) {
    const long d = D ? D : head_dim, shared = heads / kv_heads, slot = 2 * kv_heads * d;
    const float scale = 1.44269504f / std::sqrt(float(d));  // exp(x) is 2**(x * log2(e))
    // A block is read best as it lies, all heads of a token and then the next; but threads need enough to share.
    const long parts = num_tiles < 2 * threads ? kv_heads : 1, part_heads = heads / parts;
#pragma omp parallel num_threads(threads)
    {
        Tile<T> t(most_rows * part_heads, d);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < num_tiles * parts; item++) {
            const int64_t *tile = tiles + item / parts * 4, *table = tables + tile[0] * table_width;
            const long first_head = item % parts * part_heads, first = tile[1], sees = tile[3];
            const long rows = tile[2] * part_heads, context = sees + tile[2] - 1;  // context: what the last row sees
            for (long r = 0; r < rows; r++) {
                const T* from = queries + (first + r / part_heads) * stride + (first_head + r % part_heads) * d;
                std::copy(from, from + d, &t.q[r * d]);
                t.largest[r] = -INFINITY, t.total[r] = 0;
            }
            std::fill(t.seen.begin(), t.seen.begin() + rows * d, 0.0f);
            for (long start = 0, count; start < context; start += count) {
                const long offset = start % block_size;
                count = std::min({KEYS, block_size - offset, context - start});
                const T* at = cache + (table[start / block_size] * block_size + offset) * slot;
                if (const long next = start + count; next < context) {  // in another block, where no hardware looks ahead
                    const T* there = cache + (table[next / block_size] * block_size + next % block_size) * slot;
                    const long bytes = std::min(KEYS, context - next) * slot * sizeof(T);
                    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)there + i);
                }
                for (long h = 0; h < part_heads; h += shared) {
                    const Chunk<T> keys{at + (first_head + h) / shared * d, count, slot};
                    const Chunk<T> values{keys.first + kv_heads * d, count, slot};
                    arrange<D>(values, d, t.scratch.data());
                    for (long token = 0; token < tile[2]; token++) {
                        const long visible = std::min(count, sees + token - start);
                        if (visible <= 0) continue;
                        for (long r = token * part_heads + h; r < token * part_heads + h + shared; r++) {
                            float *w = &t.weights[0], *seen = &t.seen[r * d], top = t.largest[r], sum = 0;
                            dot<D>(&t.q[r * d], keys, d, w);
#pragma omp simd reduction(max : top)
                            for (long k = 0; k < KEYS; k++) {
                                w[k] = k < visible ? w[k] : -INFINITY;
                                top = w[k] > top ? w[k] : top;
                            }
                            const float kept = exp2_below_zero((t.largest[r] - top) * scale);
#pragma omp simd reduction(+ : sum)
                            for (long k = 0; k < KEYS; k++) {
                                w[k] = w[k] == -INFINITY ? 0.0f : exp2_below_zero((w[k] - top) * scale);
                                sum += w[k];
                            }
                            t.largest[r] = top, t.total[r] = t.total[r] * kept + sum;
                            if (kept != 1)
#pragma omp simd
                                for (long i = 0; i < d; i++) seen[i] *= kept;
                            add_weighted<D>(w, t.scratch.data(), d, seen);
                        }
                    }
                }
            }
            for (long r = 0; r < rows; r++) {
                T* to = out + ((first + r / part_heads) * heads + first_head + r % part_heads) * d;
#pragma omp simd
                for (long i = 0; i < d; i++) put(to[i], t.seen[r * d + i] / t.total[r]);
            }
        }
    }
}

extern "C" void glass_attend(int is_bfloat16, const void* queries, long stride, void* out, const void* cache,
                             const int64_t* tables, long table_width, const int64_t* tiles, long num_tiles,
                             long most_rows, long heads, long kv_heads, long head_dim, long block_size, int threads) {
#define ATTEND(D)                                                                                              \
    FOR_DTYPE((attend<T, D>((const T*)queries, stride, (T*)out, (const T*)cache, tables, table_width, tiles,  \
                            num_tiles, most_rows, heads, kv_heads, head_dim, block_size, threads)))
    if (head_dim == 64) {
        ATTEND(64)
    } else if (head_dim == 128) {
        ATTEND(128)
    } else {
        ATTEND(0)
    }
}
