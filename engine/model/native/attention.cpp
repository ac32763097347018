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

// One query head of one token, and what it has seen so far: the sum of weights * values, and of weights, where a
// weight is 2**((score - largest score) * scale). Of `total` only the sum of its numbers means something.
template <class T>
struct Row {
    const T* q;
    float *seen, *total, *largest;
};

// Prepares a chunk's values for all rows that will `look` at it. D: the head's width d if the compiler knows it, or 0.
template <int D, class T>
static inline void arrange(const Chunk<T>& values, long d, T* arranged) {
    for (long k = 0; k < KEYS; k++) memcpy(arranged + k * d, values[k], d * sizeof(T));
}

// Adds the first `visible` of a chunk's tokens to what the row has seen.
template <int D, class T>
static inline void look(Row<T> row, const Chunk<T>& keys, const T* arranged, long visible, float scale, long d) {
    float weights[KEYS], largest = *row.largest;
    for (long k = 0; k < visible; k++) {
        const T* key = keys[k];
        float score = 0;
#pragma omp simd reduction(+ : score)
        for (long i = 0; i < (D ? D : d); i++) score += to_float(row.q[i]) * to_float(key[i]);
        weights[k] = score;
        largest = score > largest ? score : largest;
    }
    if (largest != *row.largest) {
        const float kept = exp2_below_zero((*row.largest - largest) * scale);
        for (long k = 0; k < KEYS; k++) row.total[k] *= kept;
#pragma omp simd
        for (long i = 0; i < (D ? D : d); i++) row.seen[i] *= kept;
        *row.largest = largest;
    }
    for (long k = 0; k < visible; k++) {
        const float weight = exp2_below_zero((weights[k] - largest) * scale);
        row.total[k] += weight;
#pragma omp simd
        for (long i = 0; i < (D ? D : d); i++) row.seen[i] += weight * to_float(arranged[k * d + i]);
    }
}

#ifdef __AVX512BF16__
#include "attention_avx512.h"  // the same two for bfloat16
#endif

// queries [rows][stride]; out [rows][heads * head_dim]; cache [slots][2][kv_heads][head_dim];
// tables [requests][table_width]; tiles [num_tiles][4]: request, first row, rows, tokens that the first row sees
// (each next row sees one more).
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
        const long most = most_rows * part_heads;
        std::vector<T> q(most * d), arranged(KEYS * d);
        std::vector<float> seen(most * d), total(most * KEYS), largest(most);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < num_tiles * parts; item++) {
            const int64_t *tile = tiles + item / parts * 4, *table = tables + tile[0] * table_width;
            const long first_head = item % parts * part_heads, first = tile[1], sees = tile[3];
            const long rows = tile[2] * part_heads, context = sees + tile[2] - 1;  // context: what the last row sees
            for (long r = 0; r < rows; r++) {
                const T* from = queries + (first + r / part_heads) * stride + (first_head + r % part_heads) * d;
                std::copy(from, from + d, &q[r * d]);
                largest[r] = -INFINITY;
            }
            std::fill_n(seen.begin(), rows * d, 0.0f);
            std::fill_n(total.begin(), rows * KEYS, 0.0f);
            for (long start = 0, count; start < context; start += count) {
                const long offset = start % block_size;
                count = std::min({KEYS, block_size - offset, context - start});
                const T* at = cache + (table[start / block_size] * block_size + offset) * slot;
                // The next block lies anywhere, where no hardware looks ahead, so each row fetches a part of it in advance.
                const long next = std::min(start + count, context - 1), left = std::min(KEYS, context - next);
                const T* ahead = cache + (table[next / block_size] * block_size + next % block_size) * slot;
                const T* const end = ahead + left * slot;
                const long share = left * slot / rows;
                for (long h = 0; h < part_heads; h += shared) {
                    const Chunk<T> keys{at + (first_head + h) / shared * d, count, slot};
                    const Chunk<T> values{keys.first + kv_heads * d, count, slot};
                    arrange<D>(values, d, arranged.data());
                    for (long token = 0; token < tile[2]; token++) {
                        const long visible = std::min(count, sees + token - start);
                        if (visible <= 0) continue;
                        for (long r = token * part_heads + h; r < token * part_heads + h + shared; r++) {
                            for (const T* stop = std::min(ahead + share, end); ahead < stop; ahead += 64 / sizeof(T))
                                __builtin_prefetch(ahead, 0, 2);
                            look<D>(Row<T>{&q[r * d], &seen[r * d], &total[r * KEYS], &largest[r]}, keys,
                                    arranged.data(), visible, scale, d);
                        }
                    }
                }
            }
            for (long r = 0; r < rows; r++) {
                float sum = 0;
                for (long k = 0; k < KEYS; k++) sum += total[r * KEYS + k];
                T* to = out + ((first + r / part_heads) * heads + first_head + r % part_heads) * d;
#pragma omp simd
                for (long i = 0; i < d; i++) put(to[i], seen[r * d + i] / sum);
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
