// Compares every operation of the native library between its instruction sets, through the C interface alone:
// for processors on which the Python tests cannot run, under an emulator. The portable code is the measure.
// Exits with 1 and names the operation where they differ. With an argument it only prints the instruction sets.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kvasir_cpu.h"

namespace {

std::mt19937 noise(1);
int num_failed = 0, num_checked = 0;
std::vector<std::string> sets;

std::vector<float> normal(size_t count, float deviation = 1.0f) {
    std::normal_distribution<float> shape(0.0f, deviation);
    std::vector<float> out(count);
    for (float& x : out) x = shape(noise);
    return out;
}

int32_t below(int32_t end) { return std::uniform_int_distribution<int32_t>(0, end - 1)(noise); }

// Runs `work` with each instruction set and compares what it returns, value by value, with what the portable one
// returns, up to `tolerance` times the largest of them.
void check(const std::string& name, double tolerance, const std::function<std::vector<float>()>& work) {
    kv_use_instruction_set("portable");
    const std::vector<float> expected = work();
    double largest = 0.0;
    for (const float x : expected)
        if (std::isfinite(x)) largest = std::max(largest, double(std::fabs(x)));
    for (const std::string& set : sets) {
        if (set == "portable") continue;
        kv_use_instruction_set(set.c_str());
        const std::vector<float> seen = work();
        num_checked++;
        size_t wrong = seen.size() == expected.size() ? 0 : 1, first = 0;
        double most = 0.0;
        for (size_t i = 0; wrong == 0 && i < seen.size(); i++) {
            const bool same = std::memcmp(&seen[i], &expected[i], sizeof(float)) == 0 || seen[i] == expected[i];
            const double difference = same ? 0.0 : std::fabs(double(seen[i]) - expected[i]);
            if (difference > most) most = difference, first = i;
            if (!(difference <= tolerance * largest)) wrong = 1, first = i;
        }
        if (!wrong && largest > 0.0) continue;
        num_failed++;
        std::printf("%s with %s: %s, at %zu of %zu: %g, portable %g (largest %g)\n", name.c_str(), set.c_str(),
                    largest > 0.0 ? "differs" : "nothing but zeros", first, seen.size(),
                    first < seen.size() ? seen[first] : 0.0f, expected[first], largest);
    }
}

// ---------------------------------------------------------------- weights

struct Source {
    const char* name;
    int32_t format, columns, bytes;         // of a block
    std::vector<int32_t> halves;            // where a block's half precision numbers lie
    int32_t exponent = -1;                  // where a block's byte exponent lies
};
const Source SOURCES[] = {
    {"Q4_0", KV_Q4_0, 32, 18, {0}},          {"Q4_1", KV_Q4_1, 32, 20, {0, 2}},
    {"Q5_0", KV_Q5_0, 32, 22, {0}},          {"Q5_1", KV_Q5_1, 32, 24, {0, 2}},
    {"Q8_0", KV_Q8_0, 32, 34, {0}},          {"Q2_K", KV_Q2_K, 256, 84, {80, 82}},
    {"Q3_K", KV_Q3_K, 256, 110, {108}},      {"Q4_K", KV_Q4_K, 256, 144, {0, 2}},
    {"Q5_K", KV_Q5_K, 256, 176, {0, 2}},     {"Q6_K", KV_Q6_K, 256, 210, {208}},
    {"IQ4_NL", KV_IQ4_NL, 32, 18, {0}},      {"IQ4_XS", KV_IQ4_XS, 256, 136, {0}},
    {"MXFP4", KV_MXFP4, 32, 17, {}, 0},      {"F32", KV_F32, 32, 128, {}},
    {"F16", KV_F16, 32, 64, {}},             {"BF16", KV_BF16, 32, 64, {}},
};

struct Packed {
    std::vector<uint8_t> bytes;
    KvWeight weight;
};

Packed empty_weight(int32_t format, int32_t rows, int32_t columns) {
    Packed out{std::vector<uint8_t>(kv_packed_bytes(format, rows, columns) + 64), {format, rows, columns, 0, nullptr}};
    uintptr_t start = uintptr_t(out.bytes.data());
    out.weight.data = (void*)((start + 63) / 64 * 64);
    return out;
}

Packed pack(const Source& source, int32_t rows, int32_t columns) {
    const size_t blocks = size_t(rows) * columns / source.columns;
    std::vector<uint8_t> from(blocks * source.bytes);
    for (uint8_t& byte : from) byte = uint8_t(noise());
    for (size_t b = 0; b < blocks; b++) {
        uint8_t* block = &from[b * source.bytes];
        // Halves between 0.008 and 0.06, of both signs; exponents about 1.
        for (const int32_t at : source.halves) block[at + 1] = uint8_t((noise() & 0x83) | 0x20);
        if (source.exponent >= 0) block[source.exponent] = uint8_t(124 + below(4));
    }
    if (source.halves.empty() && source.exponent < 0)
        for (size_t i = 0; i < size_t(rows) * columns; i++) {
            const float value = normal(1)[0];
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            const uint16_t upper = uint16_t(bits >> 16), half = uint16_t((noise() & 0x83ff) | (14 + below(2)) << 10);
            if (source.bytes == 128)
                std::memcpy(&from[4 * i], &bits, 4);
            else
                std::memcpy(&from[2 * i], source.format == KV_F16 ? &half : &upper, 2);
        }
    Packed out = empty_weight(source.format, rows, columns);
    // In two parts that end within a tile.
    const int32_t upper = rows / 2;
    const KvRows parts[] = {{from.data(), upper}, {from.data() + from.size() / rows * upper, rows - upper}};
    const KvPacking packing = {source.format, columns, parts, 2, (void*)out.weight.data};
    if (kv_pack(&packing, 1) != 0) {
        std::printf("%s cannot be packed\n", source.name);
        num_failed++;
    }
    return out;
}

const KvActivation ACTIVATIONS[] = {KV_ACT_F32, KV_ACT_INT8, KV_ACT_INT16, KV_ACT_BYTE_PAIR};

void check_weight(const std::string& name, const KvWeight& weight) {
    check(name + " dequantized", 0.0, [&] {
        std::vector<float> out(size_t(weight.rows) * weight.columns);
        kv_dequantize(&weight, 0, weight.rows, out.data());
        return out;
    });
    const std::vector<float> bias = normal(weight.rows);
    int readable = 0;
    for (const KvActivation activation : ACTIVATIONS)
        for (const int32_t rows : {1, 2, 3, 4, 5, 7, 16, 17, 40}) {
            const std::vector<float> x = normal(size_t(rows) * weight.columns);
            std::vector<float> out(size_t(rows) * weight.rows);
            if (kv_matmul(&weight, activation, x.data(), rows, bias.data(), out.data()) != 0) continue;
            readable++;
            check(name + " times " + std::to_string(rows) + " rows, activation " + std::to_string(activation), 1e-5, [&] {
                std::fill(out.begin(), out.end(), NAN);
                kv_matmul(&weight, activation, x.data(), rows, bias.data(), out.data());
                return out;
            });
        }
    if (!readable) std::printf("%s multiplies nothing\n", name.c_str()), num_failed++;
}

void check_weights() {
    for (const Source& source : SOURCES) check_weight(source.name, pack(source, 27, 512).weight);
}

// ---------------------------------------------------------------- operations

void run(const std::string& name, const std::vector<KvOp>& ops, const KvBatch& batch) {
    const int32_t code = kv_check(ops.data(), int32_t(ops.size()));
    if (code != 0) {
        std::printf("%s: operation %d is refused\n", name.c_str(), -1 - code);
        num_failed++;
        return;
    }
    kv_run(ops.data(), int32_t(ops.size()), &batch);
}

KvBatch rows_only(int32_t rows) {
    KvBatch batch{};
    batch.num_rows = rows;
    return batch;
}

struct Activation {
    int32_t padded;
    std::vector<int32_t> values;  // room for floats
    std::vector<float> scales, sums;
    KvActivationBuffer buffer;
    Activation(int32_t kind, int32_t rows, int32_t columns)
        : padded((rows + KV_PANEL - 1) / KV_PANEL * KV_PANEL), values(size_t(padded) * columns),
          scales(padded * columns / 32), sums(padded * columns / 16),
          buffer{kind, columns, values.data(), scales.data(), sums.data()} {}
};

void check_elementwise() {
    const int32_t rows = 5, columns = 96;
    const std::vector<float> x = normal(rows * columns), weight = normal(columns), start = normal(rows * columns);
    for (const bool added : {false, true})
        check("norm", 1e-6, [&] {
            std::vector<float> out = start;
            KvOp op{};
            op.kind = KV_OP_NORM;
            op.epilogue = added ? KV_ADD : KV_STORE;
            op.columns = columns;
            op.factor = 1e-5f;
            op.input = x.data();
            op.norm = weight.data();
            op.output = out.data();
            run("norm", {op}, rows_only(rows));
            return out;
        });
    for (const int32_t kind : {KV_ACT_INT8, KV_ACT_INT16, KV_ACT_BYTE_PAIR})
        check("quantize to " + std::to_string(kind), 0.0, [&] {
            Activation activation(kind, rows, columns);
            KvOp op{};
            op.kind = KV_OP_QUANTIZE;
            op.columns = columns;
            op.input = x.data();
            op.activation = &activation.buffer;
            run("quantize", {op}, rows_only(rows));
            std::vector<float> out = activation.scales;
            const int8_t* bytes = (const int8_t*)activation.values.data();
            const int32_t num_bytes = activation.padded * columns * (kind == KV_ACT_INT8 ? 1 : 2);
            for (int32_t i = 0; i < num_bytes; i++) out.push_back(bytes[i]);
            return out;
        });
    const Packed table = pack(SOURCES[9], 40, 256);
    const int32_t ids[] = {3, 39, 0};
    check("embed", 1e-6, [&] {
        std::vector<float> out(3 * 256);
        KvOp op{};
        op.kind = KV_OP_EMBED;
        op.factor = 3.5f;
        op.weight = &table.weight;
        op.output = out.data();
        KvBatch batch = rows_only(3);
        batch.input_ids = ids;
        run("embed", {op}, batch);
        return out;
    });
    for (const int32_t epilogue : {KV_STORE, KV_ADD, KV_SWIGLU, KV_GEGLU, KV_CLAMPED_SWIGLU}) {
        const Packed w = pack(SOURCES[1], 48, columns);
        check("matmul with epilogue " + std::to_string(epilogue), 1e-5, [&] {
            const int32_t width = epilogue >= KV_SWIGLU ? 24 : 48;
            std::vector<float> out = start;
            out.resize(rows * width);
            Activation activation(KV_ACT_INT8, rows, columns);
            KvOp ops[2] = {};
            ops[0].kind = KV_OP_QUANTIZE;
            ops[0].columns = columns;
            ops[0].input = x.data();
            ops[0].activation = &activation.buffer;
            ops[1].kind = KV_OP_MATMUL;
            ops[1].epilogue = epilogue;
            ops[1].factor = epilogue == KV_CLAMPED_SWIGLU ? 1.702f : 0.5f;
            ops[1].soft_cap = epilogue == KV_CLAMPED_SWIGLU || epilogue == KV_STORE ? 2.0f : 0.0f;
            ops[1].weight = &w.weight;
            ops[1].activation = &activation.buffer;
            ops[1].output = out.data();
            run("matmul", {ops[0], ops[1]}, rows_only(rows));
            return out;
        });
    }
}

struct AttentionCase {
    int32_t cache_kind, head_dim, group, block_size, window;
    float soft_cap;
    bool sinks, normed, full_width;
};

// Three sequences, with contexts that take one split and several, as a decode, drafts and a prompt.
void check_attention(const AttentionCase& c) {
    const int32_t kv_heads = 2, heads = kv_heads * c.group, width = (heads + 2 * kv_heads) * c.head_dim;
    const std::vector<int32_t> new_tokens = {1, 5, 40}, contexts = {700, 70, 3};
    const int32_t rotary = c.head_dim / 2 / 2 * 2, max_blocks = 800 / c.block_size, num_blocks = 3 * max_blocks;
    std::vector<int32_t> positions, starts = {0}, lengths, tables;
    std::vector<int64_t> slots;
    for (int32_t b = 0; b < num_blocks; b++) tables.push_back((b * 7 + 3) % num_blocks);
    for (size_t s = 0; s < 3; s++) {
        for (int32_t i = 0; i < new_tokens[s]; i++) {
            const int32_t position = contexts[s] + i;
            positions.push_back(position);
            slots.push_back(int64_t(tables[s * max_blocks + position / c.block_size]) * c.block_size +
                            position % c.block_size);
        }
        starts.push_back(int32_t(positions.size()));
        lengths.push_back(contexts[s] + new_tokens[s]);
    }
    slots[3] = -1;  // a row that is not written
    const int32_t rows = int32_t(positions.size()), bytes = c.cache_kind == KV_CACHE_F32   ? 4
                                                            : c.cache_kind == KV_CACHE_F16 ? 2
                                                                                           : 1;
    const size_t size = size_t(num_blocks) * kv_heads * c.block_size * c.head_dim;
    const std::vector<float> angles = normal(800 * rotary), qkv = normal(size_t(rows) * width), sinks = normal(heads);
    const std::vector<float> q_norm = normal(heads * c.head_dim), k_norm = normal(kv_heads * c.head_dim);
    std::vector<uint8_t> first_keys(size * bytes), first_values(size * bytes);
    for (std::vector<uint8_t>* cache : {&first_keys, &first_values})
        for (size_t i = 0; i < size; i++) {
            const float value = normal(1)[0];
            const uint16_t half = uint16_t((noise() & 0x83ff) | (13 + below(3)) << 10);
            if (bytes == 4) std::memcpy(&(*cache)[4 * i], &value, 4);
            if (bytes == 2) std::memcpy(&(*cache)[2 * i], &half, 2);
            if (bytes == 1) (*cache)[i] = uint8_t(below(255) - 127);
        }
    std::vector<float> first_scales = normal(size / c.head_dim, 0.01f);
    KvBatch batch = rows_only(rows);
    batch.num_sequences = 3;
    batch.max_blocks = max_blocks;
    batch.positions = positions.data();
    batch.slot_mapping = slots.data();
    batch.cu_seqlens_q = starts.data();
    batch.seq_lens = lengths.data();
    batch.block_tables = tables.data();
    std::ostringstream name;
    name << "attention over cache " << c.cache_kind << ", head_dim " << c.head_dim << ", group " << c.group << ", block "
         << c.block_size << ", window " << c.window;
    // A cache of bytes may round otherwise in the last place, which is worth 1/127.
    check(name.str(), c.cache_kind == KV_CACHE_F32 ? 3e-5 : c.cache_kind == KV_CACHE_F16 ? 1e-3 : 1e-2, [&] {
        std::vector<float> x = qkv, out(size_t(rows) * heads * c.head_dim), key_scales = first_scales,
                           value_scales = first_scales;
        std::vector<uint8_t> keys = first_keys, values = first_values;
        KvAttentionSpec spec{};
        spec.num_heads = heads;
        spec.num_kv_heads = kv_heads;
        spec.head_dim = c.head_dim;
        spec.rotary_dim = rotary;
        spec.block_size = c.block_size;
        spec.cache_kind = c.cache_kind;
        spec.window = c.window;
        spec.full_width_norm = c.full_width;
        spec.scale = 0.2f;
        spec.soft_cap = c.soft_cap;
        spec.norm_eps = 1e-6f;
        spec.cos = angles.data();
        spec.sin = angles.data() + 7;
        spec.q_norm = c.normed ? q_norm.data() : nullptr;
        spec.k_norm = c.normed ? k_norm.data() : nullptr;
        spec.sinks = c.sinks ? sinks.data() : nullptr;
        spec.keys = keys.data();
        spec.values = values.data();
        spec.key_scales = key_scales.data();
        spec.value_scales = value_scales.data();
        KvOp ops[2] = {};
        ops[0].kind = KV_OP_ROPE_KV;
        ops[0].input = ops[0].output = x.data();
        ops[0].attention = &spec;
        ops[1].kind = KV_OP_ATTENTION;
        ops[1].input = x.data();
        ops[1].output = out.data();
        ops[1].attention = &spec;
        run(name.str(), {ops[0], ops[1]}, batch);
        out.insert(out.end(), x.begin(), x.end());  // the rotated queries and keys, too
        return out;
    });
}

void check_all_attention() {
    for (const int32_t cache : {KV_CACHE_F32, KV_CACHE_F16, KV_CACHE_INT8}) {
        check_attention({cache, 64, 3, 16, 0, 0.0f, false, false, false});
        check_attention({cache, 40, 1, 8, 100, 5.0f, true, true, false});
        check_attention({cache, 128, 8, 32, 0, 0.0f, true, true, true});
        check_attention({cache, 256, 4, 64, 33, 0.0f, false, false, false});
    }
}

void check_experts() {
    const int32_t rows = 19, columns = 64, inner = 32, experts = 6, chosen = 2, shares = rows * chosen;
    const std::vector<float> x = normal(rows * columns), logits = normal(rows * experts), start = normal(rows * columns);
    const std::vector<float> bias = normal(experts * 2 * inner);
    std::vector<Packed> up, down;
    std::vector<KvWeight> up_weights, down_weights;
    for (int32_t e = 0; e < experts; e++) {
        up.push_back(pack(SOURCES[0], 2 * inner, columns));
        down.push_back(pack(SOURCES[4], columns, inner));
        up_weights.push_back(up.back().weight);
        down_weights.push_back(down.back().weight);
    }
    check("experts", 1e-4, [&] {
        std::vector<int32_t> first(experts + 1), numbers(shares), places(shares);
        std::vector<float> weights(shares), gated(shares * inner), parts(shares * columns), out = start;
        KvRouting routing{experts, chosen, 1, 0, first.data(), numbers.data(), places.data(), weights.data()};
        Activation read(KV_ACT_INT8, shares, columns), gated_read(KV_ACT_INT16, shares, inner);
        std::vector<KvOp> ops(6);
        for (KvOp& op : ops) op.routing = &routing;
        ops[0].kind = KV_OP_ROUTE;
        ops[0].input = logits.data();
        ops[1].kind = KV_OP_GATHER;
        ops[1].columns = columns;
        ops[1].input = x.data();
        ops[1].activation = &read.buffer;
        ops[2].kind = KV_OP_EXPERT_MATMUL;
        ops[2].epilogue = KV_SWIGLU;
        ops[2].factor = 1.0f;
        ops[2].weight = up_weights.data();
        ops[2].bias = bias.data();
        ops[2].activation = &read.buffer;
        ops[2].output = gated.data();
        ops[3].kind = KV_OP_QUANTIZE;
        ops[3].columns = inner;
        ops[3].input = gated.data();
        ops[3].activation = &gated_read.buffer;
        ops[4].kind = KV_OP_EXPERT_MATMUL;
        ops[4].factor = 1.0f;
        ops[4].weight = down_weights.data();
        ops[4].activation = &gated_read.buffer;
        ops[4].output = parts.data();
        ops[5].kind = KV_OP_COMBINE;
        ops[5].columns = columns;
        ops[5].factor = 1.0f;
        ops[5].input = parts.data();
        ops[5].output = out.data();
        run("experts", ops, rows_only(rows));
        return out;
    });
}

void check_sampling() {
    for (const int32_t vocab : {1, 9, 256, 5003}) {
        const int32_t rows = 8;
        std::vector<float> logits = normal(rows * vocab, 3.0f), q(rows * vocab, 1.0f / vocab);
        logits[7 * vocab + vocab / 2] = NAN;
        const float temperature[rows] = {0.0f, 1.0f, 0.7f, 1.0f, 1.3f, 0.8f, 0.5f, 1.0f};
        const float min_p[rows] = {0, 0, 0, 0.05f, 0, 0, 0.01f, 0}, top_p[rows] = {1, 1, 0.9f, 1, 1, 0.95f, 0.8f, 1};
        const int32_t top_k[rows] = {0, 0, 0, 0, 20, 3000, 40, 0};
        const uint8_t last[rows] = {0, 0, 0, 0, 0, 0, 1, 0};
        const double uniforms[rows] = {0.1, 0.2, 0.3, 0.45, 0.5, 0.6, 0.7, 0.8};
        const int64_t drafts[rows] = {0, 0, -1, vocab - 1, vocab / 2, -1, 0, 0};
        check("sampling of " + std::to_string(vocab) + " tokens", 2e-6, [&] {
            std::vector<float> out(rows * vocab);
            std::vector<int64_t> ids(rows);
            std::vector<uint8_t> healthy(rows), accepted(rows);
            KvSampling s{};
            s.num_rows = rows;
            s.vocab_size = vocab;
            s.logits = logits.data();
            s.logits_stride = s.probs_stride = s.draft_probs_stride = vocab;
            s.temperature = temperature;
            s.min_p = min_p;
            s.top_k = top_k;
            s.top_p = top_p;
            s.temperature_last = last;
            s.uniforms = uniforms;
            s.probs = out.data();
            s.draft_ids = drafts;
            s.draft_probs = q.data();
            s.accept_uniforms = uniforms;
            s.accepted = accepted.data();
            s.token_ids = ids.data();
            s.healthy = healthy.data();
            if (kv_sample(&s) != 0) std::printf("sampling is refused\n"), num_failed++;
            // Ids and flags are compared as probabilities are: scaled so that the smallest difference is seen.
            for (int32_t r = 0; r < rows; r++) {
                out.push_back(float(ids[r]) / vocab);
                out.push_back(healthy[r]);
                out.push_back(accepted[r]);
            }
            return out;
        });
    }
}

// Short runs of changing lists with more threads than cores: many threads come when a run is over, or leave it late.
void check_late_threads() {
    const Packed small = pack(SOURCES[1], 16, 64), large = pack(SOURCES[4], 200, 96);
    const std::vector<float> x = normal(3 * 96);
    const auto products = [&](const KvWeight& weight, KvActivation activation) {
        std::vector<float> out(3 * size_t(weight.rows));
        kv_matmul(&weight, activation, x.data(), 3, nullptr, out.data());
        return out;
    };
    kv_set_num_threads(1);
    const std::vector<float> first = products(small.weight, KV_ACT_INT8), second = products(large.weight, KV_ACT_INT16);
    kv_set_num_threads(6);
    int wrong = 0;
    for (int i = 0; i < 400; i++) {
        wrong += products(small.weight, KV_ACT_INT8) != first;
        wrong += products(large.weight, KV_ACT_INT16) != second;
        if (i % 10 == 0) pack(SOURCES[9], 200, 256);
    }
    num_checked++;
    if (wrong) std::printf("%d of 800 runs of changing lists went wrong\n", wrong), num_failed++;
}

}  // namespace

int main(int num_arguments, char**) {
    if (num_arguments > 1) return std::puts(kv_instruction_sets()) < 0;
    std::istringstream names(kv_instruction_sets());
    for (std::string name; names >> name;) sets.push_back(name);
    kv_set_num_threads(2);
    check_weights();
    check_elementwise();
    check_all_attention();
    check_experts();
    check_sampling();
    check_late_threads();
    kv_set_num_threads(1);
    std::printf("%d comparisons of %s, %d failed\n", num_checked, kv_instruction_sets(), num_failed);
    return num_failed || !num_checked;
}
