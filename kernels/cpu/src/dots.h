// Integer dot products of packed weights with quantised activations, one spelling for
// every instruction set.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace KV_ISA {

#if defined(KV_X86)

// 8 rows of 4 unsigned codes each: byte 4 r + j is row r's column j.
struct Codes {
    __m256i v;
};
inline Codes load_codes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline void store(Codes c, uint8_t* p) { _mm256_storeu_si256((__m256i*)p, c.v); }
inline Codes operator|(Codes a, Codes b) { return {_mm256_or_si256(a.v, b.v)}; }
// WIDTH bits of every byte, moved from bit FROM to bit TO.
template <int FROM, int TO, int WIDTH>
inline Codes move_bits(Codes c) {
    const __m256i mask = _mm256_set1_epi8(char(((1 << WIDTH) - 1) << TO));
    if constexpr (FROM > TO) return {_mm256_and_si256(_mm256_srli_epi16(c.v, FROM - TO), mask)};
    if constexpr (FROM < TO) return {_mm256_and_si256(_mm256_slli_epi16(c.v, TO - FROM), mask)};
    return {_mm256_and_si256(c.v, mask)};
}
inline Codes look_up(Codes c, const int8_t (&table)[16]) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(values, c.v)};
}

// 8 sums of 32 bits.
struct Sums {
    __m256i v;
    F8 floats() const { return {_mm256_cvtepi32_ps(v)}; }
};
inline Sums operator+(Sums a, Sums b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Sums times_256(Sums a) { return {_mm256_slli_epi32(a.v, 8)}; }

// Keeps GCC from computing all products before any sum, far more of them than there are registers.
inline void pin(__m256i& sum) {
#if defined(__GNUC__)
    asm volatile("" : "+x"(sum));
#endif
}

// 4 bytes of an activation row, once for each lane.
using FourBytes = __m256i;
inline FourBytes broadcast_four(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm256_set1_epi32(bytes);
}

// Sums codes below 2^BITS times int8 over up to STEPS steps, one row of the activation.
// Without VNNI two products are summed in 16 bits, and as many of those as fit into them:
// 2 * 15 * 128 * 8 = 30720, 2 * 31 * 128 * 4 = 31744 and 2 * 63 * 128 * 2 = 32256, all under 32767.
template <int BITS>
struct CodeDot {
    static_assert(BITS <= 6);
    __m256i sum;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    static constexpr int STEPS = 8;
    void start(Codes w, FourBytes x) {
        sum = _mm256_dpbusd_epi32(_mm256_setzero_si256(), w.v, x);
        pin(sum);
    }
    void add(Codes w, FourBytes x) {
        sum = _mm256_dpbusd_epi32(sum, w.v, x);
        pin(sum);
    }
    Sums sums() const { return {sum}; }
#else
    static constexpr int STEPS = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;
    void start(Codes w, FourBytes x) {
        sum = _mm256_maddubs_epi16(w.v, x);
        pin(sum);
    }
    void add(Codes w, FourBytes x) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w.v, x));
        pin(sum);
    }
    Sums sums() const { return {_mm256_madd_epi16(sum, _mm256_set1_epi16(1))}; }
#endif
};

// 8 rows of 2 signed bytes each, widened to 16 bits: byte 2 r + j is row r's column j.
using BytePairs = __m256i;
inline BytePairs load_byte_pairs(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
inline void store(BytePairs w, int16_t* p) { _mm256_storeu_si256((__m256i*)p, w); }
// The pairs that the 4 bits of 16 bytes from bit FROM on name.
template <int FROM>
inline BytePairs look_up_pairs(const uint8_t* p, const int8_t (&table)[16]) {
    const __m128i values = _mm_loadu_si128((const __m128i*)table), bytes = _mm_loadu_si128((const __m128i*)p);
    const __m128i nibbles = _mm_and_si128(FROM ? _mm_srli_epi16(bytes, FROM) : bytes, _mm_set1_epi8(15));
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(values, nibbles));
}

// Sums int8 * int16 over a group of 32 for 8 rows: at most 32 * 128 * 32767, under 2^31.
struct ByteDot {
    static constexpr int STEPS = 16;
    __m256i sum;
    void start(BytePairs w, FourBytes x) {
        sum = _mm256_madd_epi16(w, x);
        pin(sum);
    }
    void add(BytePairs w, FourBytes x) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
        pin(sum);
    }
    Sums sums() const { return {sum}; }
};

#elif defined(KV_NEON)

struct Codes {
    uint8x16_t a, b;
};
inline Codes load_codes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
inline void store(Codes c, uint8_t* p) {
    vst1q_u8(p, c.a);
    vst1q_u8(p + 16, c.b);
}
inline Codes operator|(Codes x, Codes y) { return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)}; }
template <int FROM, int TO, int WIDTH>
inline Codes move_bits(Codes c) {
    const uint8x16_t mask = vdupq_n_u8(uint8_t(((1 << WIDTH) - 1) << TO));
    const auto move = [mask](uint8x16_t v) {
        if constexpr (FROM > TO) v = vshrq_n_u8(v, FROM - TO);
        if constexpr (FROM < TO) v = vshlq_n_u8(v, TO - FROM);
        return vandq_u8(v, mask);
    };
    return {move(c.a), move(c.b)};
}
inline Codes look_up(Codes c, const int8_t (&table)[16]) {
    const uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
    return {vqtbl1q_u8(values, c.a), vqtbl1q_u8(values, c.b)};
}

using FourBytes = int8x16_t;
inline FourBytes broadcast_four(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(bytes));
}

struct Sums {
    int32x4_t a, b;
    F8 floats() const { return {vcvtq_f32_s32(a), vcvtq_f32_s32(b)}; }
};
inline Sums operator+(Sums x, Sums y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
inline Sums times_256(Sums x) { return {vshlq_n_s32(x.a, 8), vshlq_n_s32(x.b, 8)}; }

template <int BITS>
struct CodeDot {
    static_assert(BITS <= 7);  // codes are read as signed bytes
    static constexpr int STEPS = 8;
    Sums sum;
    void start(const Codes& w, FourBytes x) {
        sum = {vdupq_n_s32(0), vdupq_n_s32(0)};
        add(w, x);
    }
    void add(const Codes& w, FourBytes x) {
        sum.a = vdotq_s32(sum.a, vreinterpretq_s8_u8(w.a), x);
        sum.b = vdotq_s32(sum.b, vreinterpretq_s8_u8(w.b), x);
    }
    Sums sums() const { return sum; }
};

struct BytePairs {
    int16x8_t a, b;
};
inline BytePairs widened(int8x16_t bytes) { return {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))}; }
inline BytePairs load_byte_pairs(const int8_t* p) { return widened(vld1q_s8(p)); }
inline void store(BytePairs w, int16_t* p) {
    vst1q_s16(p, w.a);
    vst1q_s16(p + 8, w.b);
}
template <int FROM>
inline BytePairs look_up_pairs(const uint8_t* p, const int8_t (&table)[16]) {
    const int8x16_t values = vld1q_s8(table);
    const uint8x16_t bytes = vld1q_u8(p);
    if constexpr (FROM) return widened(vqtbl1q_s8(values, vshrq_n_u8(bytes, FROM)));
    return widened(vqtbl1q_s8(values, vandq_u8(bytes, vdupq_n_u8(15))));
}
struct ByteDot {
    static constexpr int STEPS = 16;
    Sums sum;
    void start(const BytePairs& w, FourBytes x) {
        sum = {vdupq_n_s32(0), vdupq_n_s32(0)};
        add(w, x);
    }
    void add(const BytePairs& w, FourBytes x) {
        const int16x8_t broadcast = vreinterpretq_s16_s8(x);
        const auto pairs = [&](int16x8_t v) {
            return vpaddq_s32(vmull_s16(vget_low_s16(v), vget_low_s16(broadcast)), vmull_high_s16(v, broadcast));
        };
        sum.a = vaddq_s32(sum.a, pairs(w.a));
        sum.b = vaddq_s32(sum.b, pairs(w.b));
    }
    Sums sums() const { return sum; }
};

#else

struct Codes {
    uint8_t v[32];
    template <class Function>
    static Codes make(Function f) {
        Codes out;
        for (int i = 0; i < 32; i++) out.v[i] = uint8_t(f(i));
        return out;
    }
};
inline Codes load_codes(const uint8_t* p) { return Codes::make([&](int i) { return p[i]; }); }
inline void store(const Codes& c, uint8_t* p) { std::memcpy(p, c.v, 32); }
inline Codes operator|(const Codes& a, const Codes& b) { return Codes::make([&](int i) { return a.v[i] | b.v[i]; }); }
template <int FROM, int TO, int WIDTH>
inline Codes move_bits(const Codes& c) {
    return Codes::make([&](int i) { return (c.v[i] >> FROM & ((1 << WIDTH) - 1)) << TO; });
}
inline Codes look_up(const Codes& c, const int8_t (&table)[16]) {
    return Codes::make([&](int i) { return table[c.v[i]]; });
}

struct FourBytes {
    int8_t v[4];
};
inline FourBytes broadcast_four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }

struct Sums {
    int32_t v[8];
    F8 floats() const { return F8::make([&](int i) { return float(v[i]); }); }
};
inline Sums operator+(Sums a, const Sums& b) {
    for (int i = 0; i < 8; i++) a.v[i] += b.v[i];
    return a;
}
inline Sums times_256(Sums a) {
    for (int i = 0; i < 8; i++) a.v[i] *= 256;
    return a;
}

template <int BITS>
struct CodeDot {
    static constexpr int STEPS = 8;
    Sums sum{};
    void start(const Codes& w, FourBytes x) {
        sum = {};
        add(w, x);
    }
    void add(const Codes& w, FourBytes x) {
        for (int r = 0; r < 8; r++)
            for (int j = 0; j < 4; j++) sum.v[r] += w.v[4 * r + j] * x.v[j];
    }
    Sums sums() const { return sum; }
};

struct BytePairs {
    int8_t v[16];
};
inline BytePairs load_byte_pairs(const int8_t* p) {
    BytePairs out;
    std::memcpy(out.v, p, 16);
    return out;
}
inline void store(const BytePairs& w, int16_t* p) {
    for (int i = 0; i < 16; i++) p[i] = w.v[i];
}
template <int FROM>
inline BytePairs look_up_pairs(const uint8_t* p, const int8_t (&table)[16]) {
    BytePairs out;
    for (int i = 0; i < 16; i++) out.v[i] = table[p[i] >> FROM & 15];
    return out;
}
struct ByteDot {
    static constexpr int STEPS = 16;
    Sums sum{};
    void start(const BytePairs& w, FourBytes x) {
        sum = {};
        add(w, x);
    }
    void add(const BytePairs& w, FourBytes x) {
        int16_t two[2];
        std::memcpy(two, x.v, 4);
        for (int r = 0; r < 8; r++) sum.v[r] += w.v[2 * r] * two[0] + w.v[2 * r + 1] * two[1];
    }
    Sums sums() const { return sum; }
};

#endif

// Keeps GCC from saving what was read behind p for another use, where reading it again is cheaper.
template <class Value>
KV_INLINE const Value& read_again(const Value& from) {
    const Value* p = &from;
#if defined(__GNUC__)
    asm volatile("" : "+r"(p));
#endif
    return *p;
}

// The accumulators live in registers only if the loops over them disappear.
#if defined(__GNUC__) && (defined(KV_X86) || defined(KV_NEON))
#define KV_UNROLL _Pragma("GCC unroll 16")
#else
#define KV_UNROLL
#endif

// Part of its caller, or GCC takes a call without a result to have no effect.
KV_INLINE void prefetch(const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p);
#endif
}

// 16-bit values as byte pairs: 4 high bytes, 4 low ones, and again.
inline void store_byte_pairs(F8 rounded, int8_t* out) {
    int16_t wide[8];
    store_int16(rounded, wide);
#if defined(KV_X86)
    const __m128i v = _mm_loadu_si128((const __m128i*)wide);
    const __m128i high = _mm_srai_epi16(_mm_add_epi16(v, _mm_set1_epi16(128)), 8);
    const __m128i low = _mm_and_si128(v, _mm_set1_epi16(255));
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi32(_mm_packs_epi16(high, high), _mm_packus_epi16(low, low)));
#else
    for (int i = 0; i < 8; i++) {
        int8_t* four = out + 8 * (i / 4) + i % 4;
        four[0] = int8_t((wide[i] + 128) >> 8);
        four[4] = int8_t(wide[i] & 0xff);
    }
#endif
}

// Calls f with each of 0..COUNT, as a type.
template <int COUNT, class Function>
KV_INLINE void each_step(Function f) {
    const auto all = [&]<int... I>(std::integer_sequence<int, I...>) KV_INLINED {
        (f(std::integral_constant<int, I>()), ...);
    };
    all(std::make_integer_sequence<int, COUNT>());
}

// Sums two tiles times N runs of the activation over the steps S, whose sums need no order; `four(S, n)` points to run
// n's 4 bytes. A step's weights are unpacked when they are needed: there are more of them than registers.
template <class Dot, int N, int... S, class View, class GetFour>
KV_INLINE void dot_steps(std::integer_sequence<int, S...>, const View (&views)[2], GetFour four, Sums (&totals)[2][N]) {
    constexpr int count = sizeof...(S), at_once = std::min(Dot::STEPS, count), order[] = {S...};
    Dot dots[2][N];
    each_step<count>([&]<int I>(std::integral_constant<int, I>) KV_INLINED {
        constexpr int step = order[I];
        const auto first = views[0].template step<step>(), second = views[1].template step<step>();
        KV_UNROLL
        for (int n = 0; n < N; n++) {
            const FourBytes x = broadcast_four(four(step, n));
            if constexpr (I % at_once == 0) {
                dots[0][n].start(first, x);
                dots[1][n].start(second, x);
            } else {
                dots[0][n].add(first, x);
                dots[1][n].add(second, x);
            }
        }
        if constexpr (I % at_once == at_once - 1)
            KV_UNROLL
            for (int t = 0; t < 2; t++)
                KV_UNROLL
                for (int n = 0; n < N; n++)
                    totals[t][n] = I < at_once ? dots[t][n].sums() : totals[t][n] + dots[t][n].sums();
    });
}

}  // namespace KV_ISA
