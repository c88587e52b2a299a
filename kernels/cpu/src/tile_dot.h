// The product of one packed tile with a few activation rows, and its unpacking.
#pragma once

#include "views.h"

#if defined(_MSC_VER)
#define KV_NOINLINE __declspec(noinline)
#else
#define KV_NOINLINE __attribute__((noinline))
#endif

namespace KV_ISA {

// Some rows of a quantised activation from `first` on: in one panel, or from the first of a panel on in two.
struct PanelRows {
    const int8_t* values[2];  // of the rows in each panel
    const float *scales[2], *sums[2];

    PanelRows(const KvActivationBuffer& x, int first) {
        const int64_t lane = first % KV_PANEL, panel_groups = int64_t(x.columns) / KV_GROUP * KV_PANEL;
        const int64_t panel_bytes = int64_t(x.columns) * (x.kind == KV_ACT_INT8 ? 1 : 2) * KV_PANEL;
        for (int p = 0; p < 2; p++) {
            const int64_t panel = first / KV_PANEL + p;
            values[p] = (const int8_t*)x.values + panel * panel_bytes + 4 * lane;
            scales[p] = x.scales + panel * panel_groups + lane;
            sums[p] = x.scaled_sums + 2 * panel * panel_groups + lane;
        }
    }
    void next(int fours) {
        for (int p = 0; p < 2; p++) {
            values[p] += 4 * KV_PANEL * fours;
            scales[p] += KV_PANEL;
            sums[p] += 2 * KV_PANEL;
        }
    }
    // Row r's 4 bytes at `i` of a group.
    const int8_t* four(int i, int r) const {
        return values[r / KV_PANEL] + 4 * KV_PANEL * i + 4 * (r % KV_PANEL);
    }
    F8 scale(int r) const { return F8::set1(scales[r / KV_PANEL][r % KV_PANEL]); }
    // Of the group, and of its second half.
    F8 sum(int r) const { return F8::set1(sums[r / KV_PANEL][r % KV_PANEL]); }
    F8 second_sum(int r) const { return F8::set1(sums[r / KV_PANEL][r % KV_PANEL + KV_PANEL]); }
};

// What the kernels multiply at once: two tiles with R rows, which share the loads of each other.
// acc[t][r] = the 8 outputs of tile t for activation row first + r.
template <class View>
using TwoTiles = const typename View::Tile* const[2];

// How far ahead of the multiplication weights are asked for, in bytes; much more or less is slower.
constexpr int PREFETCH_BYTES = 1280;

// Of a tile that comes from memory. What lies so far behind its end is mostly the next that the thread multiplies.
template <class Tile>
KV_INLINE void prefetch_tile(const Tile* tile) {
    for (int i = 0; i < int(sizeof(Tile)); i += 64) prefetch((const char*)tile + PREFETCH_BYTES + i);
}

// So many sums stay in registers, beside the weights of a step and the activation that they are multiplied with.
constexpr int MOST_SUMS = 12;

// Codes times R rows over the steps of `order`; with PAIRS those of 16 bits, which lie as 4 high bytes and 4 low ones:
// 256 * high + low, at most 32 * 31 * 32639 or 16 * 63 * 32639, under 2^31.
template <bool PAIRS, int R, class View, class Order>
KV_INLINE void dot_rows(Order order, const View (&views)[2], const PanelRows& rows, Sums (&totals)[2][R]) {
    using Dot = CodeDot<View::BITS>;
    if constexpr (!PAIRS) {
        dot_steps<Dot>(order, views, [&](int s, int r) KV_INLINED { return rows.four(s, r); }, totals);
        return;
    }
    Sums high[2][R], low[2][R];
    if constexpr (4 * R <= MOST_SUMS) {
        Sums both[2][2 * R];
        dot_steps<Dot>(order, views, [&](int s, int n) KV_INLINED { return rows.four(2 * s + n / R, n % R); }, both);
        KV_UNROLL
        for (int t = 0; t < 2; t++)
            KV_UNROLL
            for (int r = 0; r < R; r++) {
                high[t][r] = both[t][r];
                low[t][r] = both[t][R + r];
            }
    } else {
        dot_steps<Dot>(order, views, [&](int s, int r) KV_INLINED { return rows.four(2 * s, r); }, high);
        const View again[2] = {{read_again(views[0].tile), views[0].g}, {read_again(views[1].tile), views[1].g}};
        dot_steps<Dot>(order, again, [&](int s, int r) KV_INLINED { return rows.four(2 * s + 1, r); }, low);
    }
    KV_UNROLL
    for (int t = 0; t < 2; t++)
        KV_UNROLL
        for (int r = 0; r < R; r++) totals[t][r] = times_256(high[t][r]) + low[t][r];
}

// One group of two tiles.
template <bool PAIRS, int R, class View>
KV_INLINE void code_group(const View (&views)[2], const PanelRows& rows, F8 (&acc)[2][R]) {
    Sums totals[2][R];
    if constexpr (View::HALVES) {
        Sums second[2][R];
        dot_rows<PAIRS>(std::integer_sequence<int, 0, 1, 2, 3>(), views, rows, totals);
        dot_rows<PAIRS>(std::integer_sequence<int, 4, 5, 6, 7>(), views, rows, second);
        KV_UNROLL
        for (int t = 0; t < 2; t++) {
            const F8 d = views[t].scale(0), m = views[t].minimum(0, d);
            const F8 second_d = views[t].scale(1), more = views[t].minimum(1, second_d) - m;
            KV_UNROLL
            for (int r = 0; r < R; r++) {
                const F8 total = fma(second[t][r].floats(), second_d, totals[t][r].floats() * d);
                const F8 sum = fma(m, rows.sum(r), fma(total, rows.scale(r), acc[t][r]));
                acc[t][r] = fma(more, rows.second_sum(r), sum);
            }
        }
    } else {
        // Two steps after each other lie in the same bytes of a 4-bit plane.
        dot_rows<PAIRS>(std::integer_sequence<int, 0, 4, 1, 5, 2, 6, 3, 7>(), views, rows, totals);
        KV_UNROLL
        for (int t = 0; t < 2; t++) {
            const F8 d = views[t].scale(0), m = views[t].minimum(0, d);
            KV_UNROLL
            for (int r = 0; r < R; r++) {
                const F8 sum = fma(totals[t][r].floats() * d, rows.scale(r), acc[t][r]);
                acc[t][r] = fma(m, rows.sum(r), sum);
            }
        }
    }
}

template <int R, class View>
KV_INLINE void byte_group(const View (&views)[2], const PanelRows& rows, F8 (&acc)[2][R]) {
    Sums totals[2][R];
    using Order = std::integer_sequence<int, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15>;
    dot_steps<ByteDot>(Order(), views, [&](int s, int r) KV_INLINED { return rows.four(s, r); }, totals);
    KV_UNROLL
    for (int t = 0; t < 2; t++) {
        const F8 d = views[t].scale();
        KV_UNROLL
        for (int r = 0; r < R; r++) acc[t][r] = fma(totals[t][r].floats() * rows.scale(r), d, acc[t][r]);
    }
}

// Quantised rows: codes times int8, codes times PAIRS of bytes, or bytes times int16.
template <int R, class View, bool PAIRS>
KV_INLINE void group_dot(const TwoTiles<View>& tiles, int blocks, bool from_memory, const KvActivationBuffer& x,
                         int first, F8 (&acc)[2][R]) {
    PanelRows rows(x, first);
    KV_UNROLL
    for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = F8::zero();
    for (int block = 0; block < blocks; block++) {
        if (from_memory)
            for (const auto* tile : tiles) prefetch_tile(tile + block);
        for (int g = 0; g < View::GROUPS; g++) {
            const View views[2] = {{tiles[0][block], g}, {tiles[1][block], g}};
            if constexpr (View::KIND == ViewKind::CODES) {
                code_group<PAIRS>(views, rows, acc);
                rows.next(PAIRS ? 16 : 8);
            } else {
                byte_group(views, rows, acc);
                rows.next(16);
            }
        }
    }
}

// Even and odd columns are summed apart, so that few rows too have sums enough to hide how long each takes; both at once
// where the registers hold them all, else those of one parity after the other's.
template <int R, class View>
KV_INLINE void dense_dot(const TwoTiles<View>& tiles, int blocks, bool from_memory, const KvActivationBuffer& x,
                         int first, F8 (&out)[2][R]) {
    constexpr int at_once = 4 * R <= MOST_SUMS ? 2 : 1;
    const float* v[R];
    F8 sums[2][2][R];  // of each parity and tile
    KV_UNROLL
    for (int r = 0; r < R; r++) {
        v[r] = (const float*)x.values + int64_t(first + r) * x.columns;
        KV_UNROLL
        for (int i = 0; i < 4; i++) sums[i / 2][i % 2][r] = F8::zero();
    }
    for (int g = 0; g < blocks; g++) {
        if (from_memory)
            for (const auto* tile : tiles) prefetch_tile(tile + g);
        const View views[2] = {{tiles[0][g], 0}, {tiles[1][g], 0}};
        KV_UNROLL
        for (int parity = 0; parity < 2; parity += at_once) {
            F8 acc[at_once][2][R];
            std::memcpy(acc, sums[parity], sizeof acc);
            for (int c = parity; c < KV_GROUP; c += 2)
                KV_UNROLL
                for (int p = 0; p < at_once; p++) {
                    const F8 w[2] = {F8::load(views[0].column(c + p)), F8::load(views[1].column(c + p))};
                    KV_UNROLL
                    for (int r = 0; r < R; r++) {
                        const F8 value = F8::set1(v[r][KV_GROUP * g + c + p]);
                        acc[p][0][r] = fma(w[0], value, acc[p][0][r]);
                        acc[p][1][r] = fma(w[1], value, acc[p][1][r]);
                    }
                }
            std::memcpy(sums[parity], acc, sizeof acc);
        }
    }
    KV_UNROLL
    for (int r = 0; r < R; r++)
        for (int t = 0; t < 2; t++) out[t][r] = sums[0][t][r] + sums[1][t][r];
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
        group_dot<R, View, false>(tiles, blocks, from_memory, x, first, acc);
    else if (x.kind == KV_ACT_INT8)
        group_dot<R, View, false>(tiles, blocks, from_memory, x, first, acc);
    else
        group_dot<R, View, true>(tiles, blocks, from_memory, x, first, acc);
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
        each_step<16>([&]<int S>(std::integral_constant<int, S>) {
            int16_t numbers[16];
            store(view.template step<S>(), numbers);
            for (int j = 0; j < 2; j++) out[2 * S + j] = scale[r] * float(numbers[2 * r + j]);
        });
    } else {
        float scale[2][KV_TILE], minimum[2][KV_TILE];
        for (int half = 0; half < 2; half++) {
            const F8 d = view.scale(half);
            d.store(scale[half]);
            view.minimum(half, d).store(minimum[half]);
        }
        each_step<8>([&]<int S>(std::integral_constant<int, S>) {
            uint8_t codes[32];
            store(view.template step<S>(), codes);
            for (int j = 0; j < 4; j++) out[4 * S + j] = scale[S / 4][r] * float(codes[4 * r + j]) + minimum[S / 4][r];
        });
    }
}

}  // namespace KV_ISA
