// The product of one packed tile with a few activation rows, and its unpacking.
#pragma once

#include "views.h"

#if defined(_MSC_VER)
#define KV_NOINLINE __declspec(noinline)
#else
#define KV_NOINLINE __attribute__((noinline))
#endif

namespace KV_ISA {

// R rows of a quantised activation, from `first` on, all in one panel.
struct PanelRows {
    static constexpr int STEP = 4 * KV_PANEL;  // from 4 bytes of a row to its next ones
    static constexpr int ROW = 4;
    const int8_t* values;
    const float *scales, *sums;

    PanelRows(const KvActivationBuffer& x, int first) {
        const int64_t groups = x.columns / KV_GROUP, bytes = int64_t(x.columns) * (x.kind == KV_ACT_INT8 ? 1 : 2);
        const int64_t lane = first % KV_PANEL, begin = first - lane;
        values = (const int8_t*)x.values + begin * bytes + ROW * lane;
        scales = x.scales + begin * groups + lane;
        sums = x.scaled_sums + 2 * begin * groups + lane;
    }
    void next(int steps) {
        values += STEP * steps;
        scales += KV_PANEL;
        sums += 2 * KV_PANEL;
    }
    F8 scale(int r) const { return F8::set1(scales[r]); }
    // Of one half of the group, and of both.
    F8 sum(int r, int half) const { return F8::set1(sums[r + KV_PANEL * half]); }
    F8 sum(int r) const { return F8::set1(sums[r] + sums[r + KV_PANEL]); }
};

// What the kernels multiply at once: two tiles with R rows, which share the loads of each other.
// acc[t][r] = the 8 outputs of tile t for activation row first + r.
template <class View>
using TwoTiles = const typename View::Tile* const[2];

// How far ahead of the multiplication weights are asked for, in bytes; much more or less is slower.
constexpr int PREFETCH_BYTES = 1280;

// Of a tile that comes from memory. What lies so far behind its end is mostly the next that the thread multiplies.
template <class Tile>
inline void prefetch_tile(const Tile* tile) {
    for (int i = 0; i < int(sizeof(Tile)); i += 64) prefetch((const char*)tile + PREFETCH_BYTES + i);
}

template <int R, class View, bool PAIRS>
inline void code_dot(const TwoTiles<View>& tiles, int blocks, bool from_memory, const KvActivationBuffer& x, int first,
                     F8 (&acc)[2][R]) {
    constexpr int steps = PAIRS ? 16 : 8, step = PanelRows::STEP;
    PanelRows rows(x, first);
    KV_UNROLL
    for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = F8::zero();
    const auto dot = [](const Codes* first_codes, const Codes* second_codes, const int8_t* v, auto count,
                        Sums (&totals)[2][R]) {
        if constexpr (PAIRS)
            dot_code_pairs<View::BITS, decltype(count)::value, step, R>(first_codes, second_codes, v, totals);
        else
            dot_codes<View::BITS, decltype(count)::value, step, R>(first_codes, second_codes, v, totals);
    };
    for (int block = 0; block < blocks; block++) {
        if (from_memory)
            for (const auto* tile : tiles) prefetch_tile(tile + block);
        for (int g = 0; g < View::GROUPS; g++, rows.next(steps)) {
            const View views[2] = {{tiles[0][block], g}, {tiles[1][block], g}};
            Codes w[2][8];
            views[0].codes(w[0]);
            views[1].codes(w[1]);
            Sums totals[2][R];
            if constexpr (View::HALVES) {
                Sums second[2][R];
                dot(w[0], w[1], rows.values, std::integral_constant<int, 4>(), totals);
                dot(w[0] + 4, w[1] + 4, rows.values + step * steps / 2, std::integral_constant<int, 4>(), second);
                KV_UNROLL
                for (int t = 0; t < 2; t++) {
                    const F8 d = views[t].scale(0), m = views[t].minimum(0, d);
                    const F8 second_d = views[t].scale(1), second_m = views[t].minimum(1, second_d);
                    KV_UNROLL
                    for (int r = 0; r < R; r++) {
                        const F8 total = fma(second[t][r].floats(), second_d, totals[t][r].floats() * d);
                        acc[t][r] = fma(total, rows.scale(r), acc[t][r]);
                        acc[t][r] = fma(m, rows.sum(r, 0), acc[t][r]);
                        acc[t][r] = fma(second_m, rows.sum(r, 1), acc[t][r]);
                    }
                }
            } else {
                dot(w[0], w[1], rows.values, std::integral_constant<int, 8>(), totals);
                KV_UNROLL
                for (int t = 0; t < 2; t++) {
                    const F8 d = views[t].scale(0), m = views[t].minimum(0, d);
                    KV_UNROLL
                    for (int r = 0; r < R; r++) {
                        acc[t][r] = fma(totals[t][r].floats() * d, rows.scale(r), acc[t][r]);
                        acc[t][r] = fma(m, rows.sum(r), acc[t][r]);
                    }
                }
            }
        }
    }
}

template <int R, class View>
inline void byte_dot(const TwoTiles<View>& tiles, int blocks, bool from_memory, const KvActivationBuffer& x, int first,
                     F8 (&acc)[2][R]) {
    constexpr int step = PanelRows::STEP;
    PanelRows rows(x, first);
    KV_UNROLL
    for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = F8::zero();
    for (int block = 0; block < blocks; block++) {
        if (from_memory)
            for (const auto* tile : tiles) prefetch_tile(tile + block);
        for (int g = 0; g < View::GROUPS; g++, rows.next(16)) {
            const View views[2] = {{tiles[0][block], g}, {tiles[1][block], g}};
            ByteDot dots[2][R];
            KV_UNROLL
            for (int s = 0; s < 8; s++) {
                BytePairs low[2], high[2];
                views[0].pairs(s, low[0], high[0]);
                views[1].pairs(s, low[1], high[1]);
                KV_UNROLL
                for (int r = 0; r < R; r++) {
                    const FourBytes v = broadcast_four(rows.values + step * s + PanelRows::ROW * r);
                    dots[0][r].add(low[0], v);
                    dots[1][r].add(low[1], v);
                }
                KV_UNROLL
                for (int r = 0; r < R; r++) {
                    const FourBytes v = broadcast_four(rows.values + step * (s + 8) + PanelRows::ROW * r);
                    dots[0][r].add(high[0], v);
                    dots[1][r].add(high[1], v);
                }
            }
            KV_UNROLL
            for (int t = 0; t < 2; t++) {
                const F8 d = views[t].scale();
                KV_UNROLL
                for (int r = 0; r < R; r++) acc[t][r] = fma(dots[t][r].finish() * rows.scale(r), d, acc[t][r]);
            }
        }
    }
}

template <int R, class View>
inline void dense_dot(const TwoTiles<View>& tiles, int blocks, bool from_memory, const KvActivationBuffer& x, int first,
                     F8 (&acc)[2][R]) {
    const float* v[R];
    F8 odd[2][R];
    for (int r = 0; r < R; r++) {
        v[r] = (const float*)x.values + int64_t(first + r) * x.columns;
        for (int t = 0; t < 2; t++) acc[t][r] = odd[t][r] = F8::zero();
    }
    for (int g = 0; g < blocks; g++) {
        if (from_memory)
            for (const auto* tile : tiles) prefetch_tile(tile + g);
        const View views[2] = {{tiles[0][g], 0}, {tiles[1][g], 0}};
        for (int c = 0; c < KV_GROUP; c += 2) {
            F8 even_column[2], odd_column[2];
            KV_UNROLL
            for (int t = 0; t < 2; t++) {
                even_column[t] = F8::load(views[t].column(c));
                odd_column[t] = F8::load(views[t].column(c + 1));
            }
            KV_UNROLL
            for (int r = 0; r < R; r++) {
                const F8 even_x = F8::set1(v[r][KV_GROUP * g + c]), odd_x = F8::set1(v[r][KV_GROUP * g + c + 1]);
                KV_UNROLL
                for (int t = 0; t < 2; t++) {
                    acc[t][r] = fma(even_column[t], even_x, acc[t][r]);
                    odd[t][r] = fma(odd_column[t], odd_x, odd[t][r]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < 2; t++) acc[t][r] = acc[t][r] + odd[t][r];
}

// Writes the 8 outputs of two tiles for R activation rows, out[R * t + r]; kept out of line, so that each exists once.
using TileDot = void (*)(const void* first_tile, const void* second_tile, int blocks, bool from_memory,
                         const KvActivationBuffer& x, int first, F8* out);

template <int R, class View>
KV_NOINLINE void tile_dot(const void* first_tile, const void* second_tile, int blocks, bool from_memory,
                          const KvActivationBuffer& x, int first, F8* out) {
    using Tile = typename View::Tile;
    const TwoTiles<View> tiles = {(const Tile*)first_tile, (const Tile*)second_tile};
    F8 acc[2][R];
    if constexpr (View::KIND == ViewKind::DENSE)
        dense_dot<R, View>(tiles, blocks, from_memory, x, first, acc);
    else if constexpr (View::KIND == ViewKind::BYTES)
        byte_dot<R, View>(tiles, blocks, from_memory, x, first, acc);
    else if (x.kind == KV_ACT_INT8)
        code_dot<R, View, false>(tiles, blocks, from_memory, x, first, acc);
    else
        code_dot<R, View, true>(tiles, blocks, from_memory, x, first, acc);
    for (int t = 0; t < 2; t++)
        for (int r = 0; r < R; r++) out[R * t + r] = acc[t][r];
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
        float scale[KV_TILE];
        view.scale().store(scale);
        for (int s = 0; s < 8; s++) {
            BytePairs pairs[2];
            view.pairs(s, pairs[0], pairs[1]);
            int16_t numbers[2][16];
            for (int half = 0; half < 2; half++) store(pairs[half], numbers[half]);
            for (int c = 0; c < 4; c++)
                out[16 * (c / 2) + 2 * s + c % 2] = scale[r] * float(numbers[c / 2][2 * r + c % 2]);
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
