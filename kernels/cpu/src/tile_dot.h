// The product of one packed tile with a few activation rows, and its unpacking.
#pragma once

#include "views.h"

#if defined(_MSC_VER)
#define KV_NOINLINE __declspec(noinline)
#else
#define KV_NOINLINE __attribute__((noinline))
#endif

namespace KV_ISA {

// Rows of an activation, seen from one matrix product.
struct ActivationRows {
    const KvActivationBuffer& buffer;
    template <class Value>
    const Value* values(int row) const {
        return (const Value*)buffer.values + int64_t(row) * buffer.columns;
    }
    const float* scales(int row) const { return buffer.scales + int64_t(row) * (buffer.columns / KV_GROUP); }
    // Two for each group, one for each half of it.
    const float* sums(int row) const { return buffer.scaled_sums + 2 * int64_t(row) * (buffer.columns / KV_GROUP); }
};

// acc[r] = the 8 outputs of one tile for activation row first + r.
template <int R, class View, bool PAIRS>
inline void code_dot(const typename View::Tile* tile, int blocks, const ActivationRows& x, int first, F8 (&acc)[R]) {
    constexpr int bytes = PAIRS ? 2 : 1;
    const int8_t* q[R];
    const float *scale[R], *sum[R];
    for (int r = 0; r < R; r++) {
        q[r] = x.values<int8_t>(bytes * (first + r));
        scale[r] = x.scales(first + r);
        sum[r] = x.sums(first + r);
        acc[r] = F8::zero();
    }
    const auto dot = [](const Codes* w, const int8_t* v, auto steps) {
        if constexpr (PAIRS)
            return dot_code_pairs<View::BITS, decltype(steps)::value>(w, v);
        else
            return dot_codes<View::BITS, decltype(steps)::value, 4>(w, v);
    };
    for (int block = 0, at = 0; block < blocks; block++)
        for (int g = 0; g < View::GROUPS; g++, at++) {
            const View view(tile[block], g);
            Codes w[8];
            view.codes(w);
            const F8 d = view.scale(0), m = view.minimum(0, d);
            if constexpr (View::HALVES) {
                const F8 second_d = view.scale(1), second_m = view.minimum(1, second_d);
                for (int r = 0; r < R; r++) {
                    const int8_t* v = q[r] + bytes * KV_GROUP * at;
                    F8 total = dot(w, v, std::integral_constant<int, 4>()).floats() * d;
                    total = fma(dot(w + 4, v + bytes * 16, std::integral_constant<int, 4>()).floats(), second_d, total);
                    acc[r] = fma(total, F8::set1(scale[r][at]), acc[r]);
                    acc[r] = fma(m, F8::set1(sum[r][2 * at]), acc[r]);
                    acc[r] = fma(second_m, F8::set1(sum[r][2 * at + 1]), acc[r]);
                }
            } else {
                for (int r = 0; r < R; r++) {
                    const int8_t* v = q[r] + bytes * KV_GROUP * at;
                    const F8 total = dot(w, v, std::integral_constant<int, 8>()).floats() * d;
                    acc[r] = fma(total, F8::set1(scale[r][at]), acc[r]);
                    acc[r] = fma(m, F8::set1(sum[r][2 * at] + sum[r][2 * at + 1]), acc[r]);
                }
            }
        }
}

template <int R, class View>
inline void byte_dot(const typename View::Tile* tile, int blocks, const ActivationRows& x, int first, F8 (&acc)[R]) {
    const int16_t* q[R];
    const float *scale[R], *sum[R];
    for (int r = 0; r < R; r++) {
        q[r] = x.values<int16_t>(first + r);
        scale[r] = x.scales(first + r);
        sum[r] = x.sums(first + r);
        acc[r] = F8::zero();
    }
    for (int block = 0, at = 0; block < blocks; block++)
        for (int g = 0; g < View::GROUPS; g++, at++) {
            const View view(tile[block], g);
            ByteDot dot[R];
            for (int s = 0; s < 8; s++) {
                BytePairs low, high;
                view.pairs(s, low, high);
                for (int r = 0; r < R; r++) {
                    dot[r].add(low, q[r] + KV_GROUP * at + 2 * s);
                    dot[r].add(high, q[r] + KV_GROUP * at + 16 + 2 * s);
                }
            }
            const F8 d = view.scale(), m = view.minimum();
            for (int r = 0; r < R; r++) {
                acc[r] = fma(dot[r].finish() * F8::set1(scale[r][at]), d, acc[r]);
                if constexpr (View::HAS_MINIMUM) acc[r] = fma(m, F8::set1(sum[r][2 * at] + sum[r][2 * at + 1]), acc[r]);
            }
        }
}

template <int R, class View>
inline void dense_dot(const typename View::Tile* tile, int blocks, const ActivationRows& x, int first, F8 (&acc)[R]) {
    const float* v[R];
    F8 odd[R];
    for (int r = 0; r < R; r++) {
        v[r] = x.values<float>(first + r);
        acc[r] = odd[r] = F8::zero();
    }
    for (int g = 0; g < blocks; g++) {
        const View view(tile[g], 0);
        for (int c = 0; c < KV_GROUP; c += 2) {
            const F8 even_column = F8::load(view.column(c)), odd_column = F8::load(view.column(c + 1));
            for (int r = 0; r < R; r++) {
                acc[r] = fma(even_column, F8::set1(v[r][KV_GROUP * g + c]), acc[r]);
                odd[r] = fma(odd_column, F8::set1(v[r][KV_GROUP * g + c + 1]), odd[r]);
            }
        }
    }
    for (int r = 0; r < R; r++) acc[r] = acc[r] + odd[r];
}

// Writes the 8 outputs of a tile for R activation rows; kept out of line, so that each exists once.
using TileDot = void (*)(const void* tile, int blocks, const ActivationRows& x, int first, F8* out);

template <int R, class View>
KV_NOINLINE void tile_dot(const void* from, int blocks, const ActivationRows& x, int first, F8* out) {
    const auto* tile = (const typename View::Tile*)from;
    F8 acc[R];
    if constexpr (View::KIND == ViewKind::DENSE)
        dense_dot<R, View>(tile, blocks, x, first, acc);
    else if constexpr (View::KIND == ViewKind::BYTES)
        byte_dot<R, View>(tile, blocks, x, first, acc);
    else if (x.buffer.kind == KV_ACT_INT8)
        code_dot<R, View, false>(tile, blocks, x, first, acc);
    else
        code_dot<R, View, true>(tile, blocks, x, first, acc);
    for (int r = 0; r < R; r++) out[r] = acc[r];
}

inline float scale_at(const uint16_t* p) { return half_to_float(*p); }
inline float scale_at(const float* p) { return *p; }
inline float scale_at(const BFloat16* p) { return p->value(); }

// Row r's 32 values of a group.
template <class View>
inline void dequantize_group(const View& view, int r, float* out) {
    if constexpr (View::KIND == ViewKind::DENSE) {
        for (int c = 0; c < KV_GROUP; c++) out[c] = scale_at(view.column(c) + r);
    } else if constexpr (View::KIND == ViewKind::BYTES) {
        float scale[KV_TILE], minimum[KV_TILE];
        view.scale().store(scale);
        view.minimum().store(minimum);
        for (int s = 0; s < 8; s++) {
            BytePairs pairs[2];
            view.pairs(s, pairs[0], pairs[1]);
            int16_t numbers[2][16];
            for (int half = 0; half < 2; half++) store(pairs[half], numbers[half]);
            for (int c = 0; c < 4; c++)
                out[16 * (c / 2) + 2 * s + c % 2] = scale[r] * float(numbers[c / 2][2 * r + c % 2]) + minimum[r];
        }
    } else {
        Codes w[8];
        view.codes(w);
        for (int half = 0; half < 2; half++) {
            float scale[KV_TILE], minimum[KV_TILE];
            const F8 d = view.scale(half);
            d.store(scale);
            view.minimum(half, d).store(minimum);
            for (int s = 4 * half; s < 4 * half + 4; s++) {
                uint8_t codes[32];
                store(w[s], codes);
                for (int j = 0; j < 4; j++) out[4 * s + j] = scale[r] * float(codes[4 * r + j]) + minimum[r];
            }
        }
    }
}

}  // namespace KV_ISA
