// `arrange` and `look` for bfloat16 and heads of 64 or 128, by instructions that multiply and add pairs of bfloat16.

#pragma once

#include <immintrin.h>

static inline __m512bh pairs(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// The 16 sums over 16 registers' floats, by halving how many registers there are.
static inline __m512 sum_each(__m512 s[KEYS]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        s[i] = _mm512_add_ps(_mm512_unpacklo_ps(s[2 * i], s[2 * i + 1]), _mm512_unpackhi_ps(s[2 * i], s[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(s[2 * i]), b = _mm512_castps_pd(s[2 * i + 1]);
        s[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {  // of s[0] to s[3], and then of the two sums, which take the places of s[4] and s[5]
        const __m512 a = s[2 * i], b = s[2 * i + 1];
        s[4 + i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return s[6];
}

// `exp2_below_zero` of 16 numbers.
static inline __m512 exp2_each(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126), x);  // in this order NaN stays
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(EXP2[5]);
    for (int i = 4; i >= 0; i--) y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(EXP2[i]));
    return _mm512_scalef_ps(_mm512_fmadd_ps(y, rest, _mm512_set1_ps(1)), whole);
}

// Values of tokens 2k and 2k + 1 take turns: what a product of pairs adds up are two tokens.
template <int D>
static inline void arrange_pairs(const Chunk<bfloat16>& values, bfloat16* arranged) {
    alignas(64) uint16_t order[2][32];  // of a result, from 32 numbers of the even token (0 to 31) and 32 of the odd
    for (int i = 0; i < 32; i++) order[0][i] = i / 2 + i % 2 * 32, order[1][i] = order[0][i] + 16;
    const __m512i lower = _mm512_load_si512(order[0]), upper = _mm512_load_si512(order[1]);
    for (int k = 0; k < KEYS; k += 2)
        for (int i = 0; i < D; i += 32) {
            const __m512i even = _mm512_loadu_si512(values[k] + i), odd = _mm512_loadu_si512(values[k + 1] + i);
            bfloat16* to = arranged + k * D + 2 * i;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, lower, odd));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, upper, odd));
        }
}

template <int D>
static inline void look_pairs(Row<bfloat16> row, const Chunk<bfloat16>& keys, const bfloat16* arranged, long visible,
                              float scale) {
    __m512 scores[KEYS];
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; k++) {
        const bfloat16* key = keys[k];
        scores[k] = _mm512_dpbf16_ps(_mm512_setzero_ps(), pairs(row.q), pairs(key));
#pragma GCC unroll 4
        for (int i = 32; i < D; i += 32) scores[k] = _mm512_dpbf16_ps(scores[k], pairs(row.q + i), pairs(key + i));
    }
    const __mmask16 seen = (1u << visible) - 1;
    const __m512 score = sum_each(scores);
    const float top = _mm512_mask_reduce_max_ps(seen, score), before = *row.largest;
    float kept = 1;
    if (!(top <= before)) {  // so also for NaN
        *row.largest = top;
        kept = exp2_below_zero((before - top) * scale);
        _mm512_storeu_ps(row.total, _mm512_mul_ps(_mm512_loadu_ps(row.total), _mm512_set1_ps(kept)));
    }
    const __m512 below = _mm512_sub_ps(score, _mm512_set1_ps(*row.largest));
    const __m512 weights = _mm512_maskz_mov_ps(seen, exp2_each(_mm512_mul_ps(below, _mm512_set1_ps(scale))));
    _mm512_storeu_ps(row.total, _mm512_add_ps(_mm512_loadu_ps(row.total), weights));
    alignas(32) int32_t weight[KEYS / 2];  // in pairs
    _mm256_store_si256((__m256i*)weight, (__m256i)_mm512_cvtneps_pbh(weights));
    __m512 sums[D / 16];
#pragma GCC unroll 8
    for (int i = 0; i < D / 16; i++) sums[i] = _mm512_mul_ps(_mm512_loadu_ps(row.seen + 16 * i), _mm512_set1_ps(kept));
#pragma GCC unroll 8
    for (int k = 0; k < KEYS / 2; k++)
#pragma GCC unroll 8
        for (int i = 0; i < D / 16; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_set1_epi32(weight[k]),
                                       pairs(arranged + 2 * (k * D + 16 * i)));
#pragma GCC unroll 8
    for (int i = 0; i < D / 16; i++) _mm512_storeu_ps(row.seen + 16 * i, sums[i]);
}

#define FOR_WIDTH(D)                                                                                                   \
    template <>                                                                                                       \
    inline void arrange<D>(const Chunk<bfloat16>& values, long, bfloat16* arranged) {                                 \
        arrange_pairs<D>(values, arranged);                                                                           \
    }                                                                                                                 \
    template <>                                                                                                       \
    inline void look<D>(Row<bfloat16> row, const Chunk<bfloat16>& keys, const bfloat16* arranged, long visible,      \
                        float scale, long) {                                                                          \
        look_pairs<D>(row, keys, arranged, visible, scale);                                                           \
    }
FOR_WIDTH(64)
FOR_WIDTH(128)
#undef FOR_WIDTH
