// Eight lanes of float, one spelling for every instruction set. Kernel sources are
// compiled once per instruction set; KV_ISA names the namespace so that the copies
// cannot mix.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#define KV_X86 1
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define KV_NEON 1
#endif

// What must become part of its caller, or what it works on would not stay in registers: KV_INLINE for functions,
// KV_INLINED after a lambda's parameters. Without vector registers it would only be more to compile.
#if defined(__GNUC__) && (defined(KV_X86) || defined(KV_NEON))
#define KV_INLINE inline __attribute__((always_inline))
#define KV_INLINED __attribute__((always_inline))
#else
#define KV_INLINE inline
#define KV_INLINED
#endif

namespace KV_ISA {

// The upper half of a float.
struct BFloat16 {
    uint16_t bits;
    float value() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float out;
        std::memcpy(&out, &wide, 4);
        return out;
    }
};

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    uint32_t bits = h & 0x7fffu;
    if (bits >= 0x7c00u) {
        bits = 0x7f800000u | (bits & 0x3ffu) << 13;
    } else if (bits >= 0x400u) {
        bits = (bits << 13) + (112u << 23);
    } else {
        // Subnormal: the value is bits * 2^-24, exact in float.
        const float value = float(bits) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even, as F16C and NEON do.
inline uint16_t float_to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits >= 0x7f800000u) return uint16_t(sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (bits >= 0x47800000u) return uint16_t(sign | 0x7c00u);
    if (bits < 0x38800000u) {
        float value;
        std::memcpy(&value, &bits, 4);
        // Adding 0.5 aligns the last bit of a subnormal half with the last bit of the sum.
        value += 0.5f;
        std::memcpy(&bits, &value, 4);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    const uint32_t odd = bits >> 13 & 1u;
    return uint16_t(sign | ((bits + 0xfffu + odd - (112u << 23)) >> 13));
}

#if defined(KV_X86)

struct F8 {
    __m256 v;
    static F8 zero() { return {_mm256_setzero_ps()}; }
    static F8 set1(float x) { return {_mm256_set1_ps(x)}; }
    static F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static F8 load(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
    static F8 load(const BFloat16* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static F8 load(const uint8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
    }
    static F8 load(const int8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(uint16_t* p) const {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
};
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F8 min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 abs(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F8 round(F8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F8 scale_by_power_of_two(F8 a, F8 n) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), shift))};
}
inline float sum(F8 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max_lane(F8 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline void store_int8(F8 rounded, int8_t* p) {
    const __m256i i32 = _mm256_cvtps_epi32(rounded.v);
    const __m128i i16 = _mm_packs_epi32(_mm256_castsi256_si128(i32), _mm256_extracti128_si256(i32, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(i16, i16));
}
inline void store_int16(F8 rounded, int16_t* p) {
    const __m256i i32 = _mm256_cvtps_epi32(rounded.v);
    _mm_storeu_si128((__m128i*)p,
                     _mm_packs_epi32(_mm256_castsi256_si128(i32), _mm256_extracti128_si256(i32, 1)));
}

// A yes or no for each lane.
struct M8 {
    __m256 v;
    static M8 none() { return {_mm256_setzero_ps()}; }
    uint32_t bits() const { return uint32_t(_mm256_movemask_ps(v)); }
};
inline M8 operator|(M8 a, M8 b) { return {_mm256_or_ps(a.v, b.v)}; }
inline M8 operator>=(F8 a, F8 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
inline M8 unordered(F8 a, F8 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q)}; }
inline F8 operator&(F8 a, M8 m) { return {_mm256_and_ps(a.v, m.v)}; }

// Sums floats as doubles.
struct D8 {
    __m256d a, b;
    static D8 zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    void add(F8 x) {
        a = _mm256_add_pd(a, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
        b = _mm256_add_pd(b, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
    }
    void store(double* p) const {
        _mm256_storeu_pd(p, a);
        _mm256_storeu_pd(p + 4, b);
    }
};

#elif defined(KV_NEON)

struct F8 {
    float32x4_t a, b;
    static F8 zero() { return set1(0.0f); }
    static F8 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
    static F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static F8 load(const uint16_t* p) {
        const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
        return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
    }
    static F8 load(const BFloat16* p) {
        const uint16x8_t h = vld1q_u16((const uint16_t*)p);
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
                vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
    }
    static F8 load(const uint8_t* p) {
        const uint16x8_t wide = vmovl_u8(vld1_u8(p));
        return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
    }
    static F8 load(const int8_t* p) {
        const int16x8_t wide = vmovl_s8(vld1_s8(p));
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
    }
    void store(float* p) const {
        vst1q_f32(p, a);
        vst1q_f32(p + 4, b);
    }
    void store(uint16_t* p) const {
        vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(a), vcvt_f16_f32(b))));
    }
};
inline F8 operator+(F8 x, F8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F8 operator-(F8 x, F8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F8 operator*(F8 x, F8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F8 operator/(F8 x, F8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F8 fma(F8 x, F8 y, F8 z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline F8 max(F8 x, F8 y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline F8 min(F8 x, F8 y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
inline F8 abs(F8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
inline F8 round(F8 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
inline F8 scale_by_power_of_two(F8 x, F8 n) {
    const auto shift = [](float32x4_t v, float32x4_t by) {
        return vreinterpretq_f32_s32(
            vaddq_s32(vreinterpretq_s32_f32(v), vshlq_n_s32(vcvtnq_s32_f32(by), 23)));
    };
    return {shift(x.a, n.a), shift(x.b, n.b)};
}
inline float sum(F8 x) { return vaddvq_f32(vaddq_f32(x.a, x.b)); }
inline float max_lane(F8 x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
inline int16x8_t to_int16(F8 rounded) {
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(rounded.a)), vqmovn_s32(vcvtnq_s32_f32(rounded.b)));
}
inline void store_int8(F8 rounded, int8_t* p) { vst1_s8(p, vqmovn_s16(to_int16(rounded))); }
inline void store_int16(F8 rounded, int16_t* p) { vst1q_s16(p, to_int16(rounded)); }

struct M8 {
    uint32x4_t a, b;
    static M8 none() { return {vdupq_n_u32(0), vdupq_n_u32(0)}; }
    uint32_t bits() const {
        const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
        return vaddvq_u32(vorrq_u32(vandq_u32(a, low), vandq_u32(b, high)));
    }
};
inline M8 operator|(M8 x, M8 y) { return {vorrq_u32(x.a, y.a), vorrq_u32(x.b, y.b)}; }
inline M8 operator>=(F8 x, F8 y) { return {vcgeq_f32(x.a, y.a), vcgeq_f32(x.b, y.b)}; }
inline M8 unordered(F8 x, F8 y) {
    const auto either = [](float32x4_t v, float32x4_t w) {
        return vmvnq_u32(vandq_u32(vceqq_f32(v, v), vceqq_f32(w, w)));
    };
    return {either(x.a, y.a), either(x.b, y.b)};
}
inline F8 operator&(F8 x, M8 m) {
    const auto keep = [](float32x4_t v, uint32x4_t by) {
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), by));
    };
    return {keep(x.a, m.a), keep(x.b, m.b)};
}

struct D8 {
    float64x2_t v[4];
    static D8 zero() { return {{vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)}}; }
    void add(F8 x) {
        v[0] = vaddq_f64(v[0], vcvt_f64_f32(vget_low_f32(x.a)));
        v[1] = vaddq_f64(v[1], vcvt_high_f64_f32(x.a));
        v[2] = vaddq_f64(v[2], vcvt_f64_f32(vget_low_f32(x.b)));
        v[3] = vaddq_f64(v[3], vcvt_high_f64_f32(x.b));
    }
    void store(double* p) const {
        for (int i = 0; i < 4; i++) vst1q_f64(p + 2 * i, v[i]);
    }
};

#else

struct F8 {
    float v[8];
    template <class Function>
    static F8 make(Function f) {
        F8 out;
        for (int i = 0; i < 8; i++) out.v[i] = f(i);
        return out;
    }
    static F8 zero() { return set1(0.0f); }
    static F8 set1(float x) { return make([&](int) { return x; }); }
    static F8 load(const float* p) { return make([&](int i) { return p[i]; }); }
    static F8 load(const uint16_t* p) { return make([&](int i) { return half_to_float(p[i]); }); }
    static F8 load(const BFloat16* p) { return make([&](int i) { return p[i].value(); }); }
    static F8 load(const uint8_t* p) { return make([&](int i) { return float(p[i]); }); }
    static F8 load(const int8_t* p) { return make([&](int i) { return float(p[i]); }); }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
    void store(uint16_t* p) const {
        for (int i = 0; i < 8; i++) p[i] = float_to_half(v[i]);
    }
};
inline F8 operator+(F8 a, F8 b) { return F8::make([&](int i) { return a.v[i] + b.v[i]; }); }
inline F8 operator-(F8 a, F8 b) { return F8::make([&](int i) { return a.v[i] - b.v[i]; }); }
inline F8 operator*(F8 a, F8 b) { return F8::make([&](int i) { return a.v[i] * b.v[i]; }); }
inline F8 operator/(F8 a, F8 b) { return F8::make([&](int i) { return a.v[i] / b.v[i]; }); }
inline F8 fma(F8 a, F8 b, F8 c) { return F8::make([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F8 max(F8 a, F8 b) { return F8::make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F8 min(F8 a, F8 b) { return F8::make([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F8 abs(F8 a) { return F8::make([&](int i) { return std::fabs(a.v[i]); }); }
inline F8 round(F8 a) { return F8::make([&](int i) { return std::nearbyintf(a.v[i]); }); }
inline F8 scale_by_power_of_two(F8 a, F8 n) {
    return F8::make([&](int i) { return std::ldexp(a.v[i], int(n.v[i])); });
}
inline float sum(F8 a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline float max_lane(F8 a) {
    float m = a.v[0];
    for (int i = 1; i < 8; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
inline void store_int8(F8 rounded, int8_t* p) {
    for (int i = 0; i < 8; i++) p[i] = int8_t(rounded.v[i]);
}
inline void store_int16(F8 rounded, int16_t* p) {
    for (int i = 0; i < 8; i++) p[i] = int16_t(rounded.v[i]);
}

struct M8 {
    bool v[8];
    template <class Function>
    static M8 make(Function f) {
        M8 out;
        for (int i = 0; i < 8; i++) out.v[i] = f(i);
        return out;
    }
    static M8 none() { return make([](int) { return false; }); }
    uint32_t bits() const {
        uint32_t all = 0;
        for (int i = 0; i < 8; i++) all |= uint32_t(v[i]) << i;
        return all;
    }
};
inline M8 operator|(M8 a, M8 b) { return M8::make([&](int i) { return a.v[i] || b.v[i]; }); }
inline M8 operator>=(F8 a, F8 b) { return M8::make([&](int i) { return a.v[i] >= b.v[i]; }); }
inline M8 unordered(F8 a, F8 b) { return M8::make([&](int i) { return std::isunordered(a.v[i], b.v[i]); }); }
inline F8 operator&(F8 a, M8 m) { return F8::make([&](int i) { return m.v[i] ? a.v[i] : 0.0f; }); }

struct D8 {
    double v[8];
    static D8 zero() { return {}; }
    void add(F8 x) {
        for (int i = 0; i < 8; i++) v[i] += double(x.v[i]);
    }
    void store(double* p) const { std::memcpy(p, v, sizeof v); }
};

#endif

// exp to about 2 ulp for inputs in [-87, 88], clamped outside: range reduction by ln 2
// split in two, then the degree-5 minimax polynomial of Cephes expf.
inline F8 exp(F8 x) {
    x = min(max(x, F8::set1(-87.0f)), F8::set1(88.0f));
    const F8 n = round(x * F8::set1(1.44269504088896341f));
    F8 r = fma(n, F8::set1(-0.693359375f), x);
    r = fma(n, F8::set1(2.12194440e-4f), r);
    F8 p = F8::set1(1.9875691500e-4f);
    p = fma(p, r, F8::set1(1.3981999507e-3f));
    p = fma(p, r, F8::set1(8.3334519073e-3f));
    p = fma(p, r, F8::set1(4.1665795894e-2f));
    p = fma(p, r, F8::set1(1.6666665459e-1f));
    p = fma(p, r, F8::set1(5.0000001201e-1f));
    p = fma(p, r * r, r + F8::set1(1.0f));
    return scale_by_power_of_two(p, n);
}

}  // namespace KV_ISA
