// The model's dtypes: a number is read in its dtype, computed in float, rounded once and written.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct bfloat16 {
    uint16_t bits;
};

static inline float to_float(float x) { return x; }
static inline float to_float(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
static inline void put(float& to, float x) { to = x; }
static inline void put(bfloat16& to, float x) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// 2**x = 1 + EXP2[0] * x + EXP2[1] * x**2 + ... for x from 0 to 1, but for 2e-7.
static constexpr float EXP2[6] = {0.693147182f,   0.240226463f,   0.0555040880f,
                                  0.00961834066f, 0.00133340399f, 0.000154697f};

// 2**x for x <= 0; what float cannot hold is 0. Written out, so that compilers compute many at once.
static inline float exp2_below_zero(float x) {
    x = x < -127.0f ? -127.0f : x;  // false for NaN, which stays; 2**-127 comes out as 0
    float whole = std::floor(x), rest = x - whole;
    float y = EXP2[5];
    for (int i = 4; i >= 0; i--) y = y * rest + EXP2[i];
    y = y * rest + 1.0f;
    int32_t exponent = (int32_t(whole) + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return y * scale;
}

// What Python calls takes addresses without a type: `call` runs with T as what they point to.
#define FOR_DTYPE(call)         \
    if (is_bfloat16) {          \
        using T = bfloat16;     \
        call;                   \
    } else {                    \
        using T = float;        \
        call;                   \
    }
