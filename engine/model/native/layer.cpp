// What lies between a layer's matrix products, apart from attention: one pass over memory each.
//
// In PyTorch each of these is a chain of small operations, and starting one costs as much as it does for a few rows.

#include "numbers.h"

static const long FEW = 4096;  // numbers that one thread is done with before a second would have begun

// hidden[row] += delta[row], if there is a delta; out[row] = hidden[row] / its root mean square.
template <class T>
static void add_norm(T* hidden, const T* delta, T* out, long rows, long width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (long row = 0; row < rows; row++) {
        T* h = hidden + row * width;
        float squares = 0;
        if (delta) {
            const T* d = delta + row * width;
#pragma omp simd
            for (long i = 0; i < width; i++) put(h[i], to_float(h[i]) + to_float(d[i]));
        }
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < width; i++) squares += to_float(h[i]) * to_float(h[i]);
        float scale = 1 / std::sqrt(squares / width + eps);
#pragma omp simd
        for (long i = 0; i < width; i++) put(out[row * width + i], to_float(h[i]) * scale);
    }
}

// out[row] = silu(gate) * up; gate_up[row] holds first `width` numbers of the one, then of the other.
template <class T>
static void silu_mul(const T* gate_up, T* out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (long row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * width, *up = gate + width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float g = to_float(gate[i]);
            float e = exp2_below_zero(-std::fabs(g) * 1.44269504f);  // exp(-|g|): no overflow either way
            put(out[row * width + i], g * (g < 0 ? e : 1.0f) / (1.0f + e) * to_float(up[i]));
        }
    }
}

// Turns queries and keys by their positions, and writes keys and values to the cache.
// qkv [rows][heads + 2 * kv_heads][head_dim], queries and keys changed in place; cos, sin [rows][head_dim / 2];
// slots [rows]; q_weight, k_weight [head_dim]: norms before the turn, if not null (Qwen3).
// sums [rows] += the keys and values written: NaN or infinity if one of them is.
template <class T>
static void rotate_store(T* qkv, const float* cos, const float* sin, const int64_t* slots, const T* q_weight,
                         const T* k_weight, float eps, T* cache, float* sums, long rows, long heads,
                         long kv_heads, long head_dim, int threads) {
    const long half = head_dim / 2, width = (heads + 2 * kv_heads) * head_dim, stored = 2 * kv_heads * head_dim;
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (long row = 0; row < rows; row++) {
        const float *c = cos + row * half, *s = sin + row * half;
        for (long head = 0; head < heads + kv_heads; head++) {
            T* x = qkv + row * width + head * head_dim;
            if (const T* weight = head < heads ? q_weight : k_weight) {
                float squares = 0;
                for (long i = 0; i < head_dim; i++) squares += to_float(x[i]) * to_float(x[i]);
                float scale = 1 / std::sqrt(squares / head_dim + eps);
                for (long i = 0; i < head_dim; i++) put(x[i], to_float(x[i]) * scale * to_float(weight[i]));
            }
#pragma omp simd
            for (long i = 0; i < half; i++) {
                float a = to_float(x[i]), b = to_float(x[half + i]);
                put(x[i], a * c[i] - b * s[i]);
                put(x[half + i], b * c[i] + a * s[i]);
            }
        }
        const T* from = qkv + row * width + heads * head_dim;
        memcpy(cache + slots[row] * stored, from, stored * sizeof(T));
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < stored; i++) sum += to_float(from[i]);
        sums[row] += sum;
    }
}

extern "C" void glass_add_norm(int is_bfloat16, void* hidden, const void* delta, void* out, long rows, long width,
                               float eps, int threads) {
    FOR_DTYPE(add_norm((T*)hidden, (const T*)delta, (T*)out, rows, width, eps, threads))
}

extern "C" void glass_silu_mul(int is_bfloat16, const void* gate_up, void* out, long rows, long width, int threads) {
    FOR_DTYPE(silu_mul((const T*)gate_up, (T*)out, rows, width, threads))
}

extern "C" void glass_rotate_store(int is_bfloat16, void* qkv, const float* cos, const float* sin,
                                   const int64_t* slots, const void* q_weight, const void* k_weight, float eps,
                                   void* cache, float* sums, long rows, long heads, long kv_heads, long head_dim,
                                   int threads) {
    FOR_DTYPE(rotate_store((T*)qkv, cos, sin, slots, (const T*)q_weight, (const T*)k_weight, eps, (T*)cache, sums,
                           rows, heads, kv_heads, head_dim, threads))
}
