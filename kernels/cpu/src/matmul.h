// Matrix products over packed weights. Every row count runs the same arithmetic in
// the same order, so a token's result does not depend on what else is in the batch.
#pragma once

#include <algorithm>

#include "isa.h"
#include "tile_dot.h"

namespace KV_ISA {

inline F8 silu(F8 x) { return x / (F8::set1(1.0f) + exp(F8::zero() - x)); }
inline F8 tanh(F8 x) {
    const F8 e = exp(x + x);
    return F8::set1(1.0f) - F8::set1(2.0f) / (e + F8::set1(1.0f));
}
inline F8 soft_capped(F8 x, float cap) { return F8::set1(cap) * tanh(x / F8::set1(cap)); }
inline F8 gelu_tanh(F8 x) {
    const F8 inner = F8::set1(0.7978845608028654f) * fma(F8::set1(0.044715f) * x * x, x, x);
    return F8::set1(0.5f) * x * (F8::set1(1.0f) + tanh(inner));
}

inline F8 gated(const KvOp& op, F8 gate, F8 up) {
    if (op.epilogue == KV_SWIGLU) return silu(gate) * up;
    if (op.epilogue == KV_GEGLU) return gelu_tanh(gate) * up;
    const F8 one = F8::set1(1.0f), limit = F8::set1(op.soft_cap);
    const F8 g = min(gate, limit), u = max(min(up, limit), F8::zero() - limit);
    return g / (one + exp(F8::zero() - F8::set1(op.factor) * g)) * (u + one);
}

// Stores or adds the first `count` lanes.
inline void store_lanes(F8 value, float* out, int count, bool add) {
    if (count >= KV_TILE) {
        (add ? F8::load(out) + value : value).store(out);
        return;
    }
    float lanes[KV_TILE];
    value.store(lanes);
    for (int i = 0; i < count; i++) out[i] = add ? out[i] + lanes[i] : lanes[i];
}

inline F8 load_bias(const float* bias, int first, int count) {
    if (!bias) return F8::zero();
    if (count >= KV_TILE) return F8::load(bias + first);
    float lanes[KV_TILE] = {};
    std::memcpy(lanes, bias + first, sizeof(float) * count);
    return F8::load(lanes);
}

// Calls f with a pointer whose type says which view reads a weight format.
template <class Function>
inline void with_view(int format, Function f) {
    switch (format) {
        case KV_F32: return f((DenseView<float>*)nullptr);
        case KV_F16: return f((DenseView<Half>*)nullptr);
        case KV_BF16: return f((DenseView<BFloat16>*)nullptr);
        case KV_Q4_0: return f((Q4_0View*)nullptr);
        case KV_Q4_1: return f((Q4_1View*)nullptr);
        case KV_Q5_0: return f((Q5_0View*)nullptr);
        case KV_Q5_1: return f((Q5_1View*)nullptr);
        case KV_Q8_0: return f((Q8_0View*)nullptr);
        case KV_Q2_K: return f((Q2KView*)nullptr);
        case KV_Q3_K: return f((Q3KView*)nullptr);
        case KV_Q4_K: return f((Q4KView*)nullptr);
        case KV_Q5_K: return f((Q5KView*)nullptr);
        case KV_Q6_K: return f((Q6KView*)nullptr);
        case KV_IQ4_NL: return f((IQ4NLView*)nullptr);
        case KV_IQ4_XS: return f((IQ4XSView*)nullptr);
        case KV_MXFP4: return f((MXFP4View*)nullptr);
    }
}

// Without vector registers, more rows at a time would only be more to compile.
#if defined(KV_X86) || defined(KV_NEON)
constexpr int ROWS_AT_ONCE = MOST_SUMS / 2;
#else
constexpr int ROWS_AT_ONCE = 1;
#endif

// How many of the rows from `row` on are multiplied at once: all that are left, if the registers hold their sums, else
// those of one panel.
inline int rows_at(int row, int end) {
    const int lane = row % KV_PANEL;
    if (lane == 0 && end - row <= ROWS_AT_ONCE) return end - row;
    return std::min({end - row, KV_PANEL - lane, ROWS_AT_ONCE});
}

// So many rows stay in the first-level cache, and weights stream past them in order.
constexpr int STREAMED_ROWS = 2 * KV_PANEL;

// The kernels of one weight format, for 1 to ROWS_AT_ONCE rows.
struct FormatKernels {
    TileDot dots[ROWS_AT_ONCE + 1] = {};
    int blocks = 0;
    int64_t tile_bytes = 0;

    explicit FormatKernels(const KvWeight& weight) {
        with_view(weight.format, [&]<class View>(View*) {
            const auto fill = [&]<int... R>(std::integer_sequence<int, R...>) {
                ((dots[R + 1] = tile_dot<R + 1, View>), ...);
            };
            fill(std::make_integer_sequence<int, ROWS_AT_ONCE>());
            blocks = weight.columns / (KV_GROUP * View::GROUPS);
            tile_bytes = int64_t(sizeof(typename View::Tile)) * blocks;
        });
    }
};

// Two tiles of a weight for `count` rows: of a paired epilogue a gate's and its up's, else as far apart,
// so that units one after another read two runs of memory in order, each without a gap. Not fetched `from_memory`: the
// tiles are in a cache already.
inline void two_tiles(const KvOp& op, const FormatKernels& kernels, int unit, int first, int count, bool from_memory) {
    const KvWeight& weight = *op.weight;
    const char* weights = (const char*)weight.data;
    F8 acc[2 * ROWS_AT_ONCE];
    const auto multiply = [&](int second_unit) {
        kernels.dots[count](weights + kernels.tile_bytes * unit, weights + kernels.tile_bytes * second_unit,
                            kernels.blocks, from_memory, *op.activation, first, acc);
    };
    if (is_paired(op)) {
        const int width = weight.rows / 2, stride = op.output_stride ? op.output_stride : width, at = KV_TILE * unit;
        multiply(unit + width / KV_TILE);
        const F8 gate_bias = load_bias(op.bias, at, KV_TILE), up_bias = load_bias(op.bias, width + at, KV_TILE);
        for (int r = 0; r < count; r++) {
            const F8 out = gated(op, acc[r] + gate_bias, acc[count + r] + up_bias);
            out.store((float*)op.output + int64_t(first + r) * stride + at);
        }
        return;
    }
    const int last = (weight.rows - 1) / KV_TILE, half = last / 2 + 1;
    const int stride = op.output_stride ? op.output_stride : weight.rows;
    multiply(std::min(unit + half, last));
    const F8 factor = F8::set1(op.factor);
    for (int t = 0; t < 2 && unit + half * t <= last; t++) {
        const int at = KV_TILE * (unit + half * t), lanes = std::min<int>(KV_TILE, weight.rows - at);
        const F8 bias = load_bias(op.bias, at, lanes);
        for (int r = 0; r < count; r++) {
            F8 result = (acc[count * t + r] + bias) * factor;
            if (op.soft_cap > 0.0f) result = soft_capped(result, op.soft_cap);
            store_lanes(result, (float*)op.output + int64_t(first + r) * stride + at, lanes, op.epilogue == KV_ADD);
        }
    }
}

// Calls f with every unit of a weight that streams past few rows. Each thread's first ticket is for most of an
// equal share in one piece, since memory is read fastest in order; what is left of the shares goes in small pieces
// to whoever is free, its neighbour's pieces included.
template <class Function>
inline void stream_units(int units, WorkQueue& queue, Function f) {
    const int threads = queue.num_threads, share = (units + threads - 1) / threads, large = share - share / 4;
    const int small = std::max(1, (share - large + 3) / 4), pieces = (share - large + small - 1) / small;
    for (int ticket = queue.take(); ticket < threads * (1 + pieces); ticket = queue.take()) {
        const int owner = ticket % threads, piece = ticket / threads, share_end = std::min(units, (owner + 1) * share);
        const int begin = owner * share + (piece == 0 ? 0 : large + (piece - 1) * small);
        const int end = std::min(share_end, begin + (piece == 0 ? large : small));
        for (int unit = begin; unit < end; unit++) f(unit);
    }
}

// Rows first_row..end_row of the activation and of the output.
inline void matmul_rows(const KvOp& op, int first_row, int end_row, WorkQueue& queue) {
    const FormatKernels kernels(*op.weight);
    const int tiles = (op.weight->rows + KV_TILE - 1) / KV_TILE, units = (tiles + 1) / 2;
    if (end_row - first_row <= STREAMED_ROWS) {
        stream_units(units, queue, [&](int unit) {
            for (int row = first_row, count; row < end_row; row += count) {
                count = rows_at(row, end_row);
                two_tiles(op, kernels, unit, row, count, row == first_row);
            }
        });
        return;
    }
    // A block of tiles stays in the second-level cache while the rows go past it, a panel in the first-level one.
    const int row_block = 32 * KV_PANEL, first_panel_row = first_row - first_row % KV_PANEL;
    const int row_blocks = (end_row - first_panel_row + row_block - 1) / row_block;
    const int unit_block = std::max(1, std::min(16, units * row_blocks / 16));
    const int unit_blocks = (units + unit_block - 1) / unit_block;
    for (int chunk = queue.take(); chunk < row_blocks * unit_blocks; chunk = queue.take()) {
        const int block_begin = first_panel_row + chunk / unit_blocks * row_block;
        const int row_end = std::min(end_row, block_begin + row_block);
        const int unit_begin = chunk % unit_blocks * unit_block, unit_end = std::min(units, unit_begin + unit_block);
        for (int row = std::max(first_row, block_begin), count; row < row_end; row += count) {
            count = rows_at(row, row_end);
            const bool from_memory = row == std::max(first_row, block_begin);
            for (int unit = unit_begin; unit < unit_end; unit++) two_tiles(op, kernels, unit, row, count, from_memory);
        }
    }
}

inline void matmul(const KvOp& op, int num_rows, WorkQueue& queue) { matmul_rows(op, 0, num_rows, queue); }

template <class View>
inline void dequantize_rows(const KvWeight& weight, int first, int count, float* out) {
    const int blocks = weight.columns / (KV_GROUP * View::GROUPS);
    for (int row = first; row < first + count; row++) {
        const auto* tile = (const typename View::Tile*)weight.data + int64_t(row / KV_TILE) * blocks;
        for (int g = 0; g < blocks * View::GROUPS; g++, out += KV_GROUP)
            dequantize_group(View(tile[g / View::GROUPS], g % View::GROUPS), row % KV_TILE, out);
    }
}

inline void dequantize(const KvWeight& weight, int32_t first, int32_t count, float* out) {
    with_view(weight.format, [&]<class View>(View*) { dequantize_rows<View>(weight, first, count, out); });
}

}  // namespace KV_ISA
