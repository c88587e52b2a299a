// Runs a list of operations on the thread pool, and chooses the instruction set.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "isa.h"
#include "pack.h"
#include "threads.h"

namespace {

// Fixed, whatever the batch and the number of threads: the order of summation, and so
// a token's result, must not depend on its neighbours.
constexpr int KEYS_PER_SPLIT = 256;
constexpr int MAX_QUERIES = 32;

bool supported(const char* name) {
#if defined(__x86_64__) || defined(_M_X64)
    if (!std::strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!std::strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return true;
}

// Best first.
std::vector<const KernelTable*> usable_tables() {
    std::vector<const KernelTable*> tables;
#if defined(KV_HAVE_AVX512)
    if (supported("avx512")) tables.push_back(&kv_avx512::table);
#endif
#if defined(KV_HAVE_AVX2)
    if (supported("avx2")) tables.push_back(&kv_avx2::table);
#endif
#if defined(KV_HAVE_NEON)
    tables.push_back(&kv_neon::table);
#endif
    tables.push_back(&kv_portable::table);
    return tables;
}

struct AttentionPlan {
    int32_t num_heads, num_kv_heads, head_dim;
    bool any_split = false;
    std::vector<AttentionItem> items;
    std::vector<float> partials;

    bool serves(const KvAttentionSpec& spec) const {
        return num_heads == spec.num_heads && num_kv_heads == spec.num_kv_heads && head_dim == spec.head_dim;
    }
};

// Buffers whose memory is kept from run to run.
struct Runtime {
    ThreadPool pool;
    Barrier barrier;
    const KernelTable* kernels = usable_tables().front();
    std::deque<AttentionPlan> plans;
    std::deque<WorkQueue> queues;
};

Runtime& runtime() {
    static Runtime instance;
    return instance;
}

void make_plan(AttentionPlan& plan, const KvAttentionSpec& spec, const KvBatch& batch) {
    plan.num_heads = spec.num_heads;
    plan.num_kv_heads = spec.num_kv_heads;
    plan.head_dim = spec.head_dim;
    plan.any_split = false;
    plan.items.clear();
    const int group = spec.num_heads / spec.num_kv_heads, rows_per_item = std::max(1, MAX_QUERIES / group);
    int64_t num_partials = 0;
    for (int s = 0; s < batch.num_sequences; s++) {
        const int begin = batch.cu_seqlens_q[s], end = batch.cu_seqlens_q[s + 1];
        for (int row = begin; row < end; row += rows_per_item) {
            const int rows = std::min(rows_per_item, end - row), keys = batch.positions[row + rows - 1] + 1;
            const int splits = (keys + KEYS_PER_SPLIT - 1) / KEYS_PER_SPLIT;
            for (int head = 0; head < spec.num_kv_heads; head++)
                for (int i = 0; i < splits; i++) {
                    plan.items.push_back({s, row, rows, head, i * KEYS_PER_SPLIT,
                                          std::min(keys, (i + 1) * KEYS_PER_SPLIT), i, splits, nullptr});
                    if (splits > 1) num_partials += int64_t(rows) * group * (2 + spec.head_dim);
                }
        }
    }
    plan.any_split = num_partials > 0;
    if (int64_t(plan.partials.size()) < num_partials) plan.partials.resize(num_partials);
    float* next = plan.partials.data();
    for (AttentionItem& item : plan.items) {
        if (item.num_splits == 1) continue;
        item.partial = next;
        next += int64_t(item.num_rows) * group * (2 + spec.head_dim);
    }
}

bool valid_weight(const KvWeight* w) {
    return w && w->data && kv_packed_bytes(w->format, w->rows, w->columns) > 0;
}

bool valid(const KvOp& op) {
    switch (op.kind) {
        case KV_OP_EMBED: return valid_weight(op.weight) && op.output;
        case KV_OP_NORM:
        case KV_OP_QUANTIZE:
            return op.input && op.columns > 0 && op.columns % KV_GROUP == 0 && op.columns <= 16384 &&
                   (op.activation ? op.activation->columns == op.columns : op.kind == KV_OP_NORM && op.output);
        case KV_OP_MATMUL: {
            if (!valid_weight(op.weight) || !op.activation || !op.output) return false;
            const bool paired = op.epilogue == KV_SWIGLU || op.epilogue == KV_GEGLU;
            const int format = op.weight->format;
            const int kind = op.activation->kind;
            const bool is_4_bit = format == KV_Q4_F16 || format == KV_Q4_F32;
            const bool is_8_bit = format == KV_Q8_F16 || format == KV_Q8_F32;
            const bool readable = is_4_bit   ? (kind == KV_ACT_INT8 || kind == KV_ACT_BYTE_PAIR) && op.activation->scaled_sums
                                  : is_8_bit ? kind == KV_ACT_INT16
                                             : kind == KV_ACT_F32;
            return readable && op.activation->columns == op.weight->columns &&
                   !(paired && (op.weight->rows % (2 * KV_TILE) || op.bias));
        }
        case KV_OP_ROPE_KV:
        case KV_OP_ATTENTION: {
            const KvAttentionSpec* a = op.attention;
            return a && a->num_kv_heads > 0 && a->num_heads % a->num_kv_heads == 0 &&
                   a->num_heads / a->num_kv_heads <= MAX_QUERIES && a->head_dim % 8 == 0 && a->head_dim <= 256 &&
                   a->rotary_dim % 2 == 0 && a->rotary_dim <= a->head_dim && a->block_size % 8 == 0 &&
                   a->block_size <= 64 && 64 % a->block_size == 0 && a->keys && a->values && op.output &&
                   (op.kind == KV_OP_ROPE_KV || op.input);
        }
        case KV_OP_SELECT: return op.input && op.output && op.columns > 0;
        default: return false;
    }
}

struct Step {
    const KvOp* op;
    int32_t index;
    const AttentionPlan* plan;  // attention only
    bool reduce;
};

void run_step(const KernelTable& k, const Step& step, const KvBatch& batch, WorkQueue& queue) {
    const KvOp& op = *step.op;
    const int32_t rows = op.on_selected ? batch.num_selected : batch.num_rows;
    switch (op.kind) {
        case KV_OP_EMBED: return k.embed(op, batch, queue);
        case KV_OP_NORM: return k.norm(op, rows, queue);
        case KV_OP_QUANTIZE: return k.quantize(op, rows, queue);
        case KV_OP_MATMUL: return k.matmul(op, rows, queue);
        case KV_OP_ROPE_KV: return k.rope_kv(op, batch, queue);
        case KV_OP_ATTENTION: {
            const std::vector<AttentionItem>& items = step.plan->items;
            const auto run = step.reduce ? k.attention_reduce : k.attention;
            return run(op, batch, items.data(), int32_t(items.size()), queue);
        }
        case KV_OP_SELECT:
            for (int i = queue.take(); i < batch.num_selected; i = queue.take())
                std::memcpy((float*)op.output + int64_t(i) * op.columns,
                            (const float*)op.input + int64_t(batch.selected[i]) * op.columns,
                            sizeof(float) * op.columns);
            return;
    }
}

int32_t run(const KvOp* ops, int32_t num_ops, const KvBatch& batch, int64_t* nanoseconds) {
    Runtime& rt = runtime();
    size_t num_plans = 0;
    std::vector<Step> steps;
    steps.reserve(num_ops + 64);
    for (int32_t i = 0; i < num_ops; i++) {
        if (!valid(ops[i])) return -1 - i;
        Step step{&ops[i], i, nullptr, false};
        if (ops[i].kind == KV_OP_ATTENTION) {
            const KvAttentionSpec& spec = *ops[i].attention;
            AttentionPlan* plan = nullptr;
            for (size_t p = 0; p < num_plans && !plan; p++)
                if (rt.plans[p].serves(spec)) plan = &rt.plans[p];
            if (!plan) {
                if (rt.plans.size() == num_plans) rt.plans.emplace_back();
                plan = &rt.plans[num_plans++];
                make_plan(*plan, spec, batch);
            }
            step.plan = plan;
            steps.push_back(step);
            step.reduce = true;
            if (!plan->any_split) continue;
        }
        steps.push_back(step);
    }
    while (rt.queues.size() < steps.size()) rt.queues.emplace_back();
    for (size_t i = 0; i < steps.size(); i++) rt.queues[i].next.store(0, std::memory_order_relaxed);
    rt.barrier.reset(rt.pool.size());
    rt.pool.run([&](int thread) {
        auto before = std::chrono::steady_clock::now();
        for (size_t i = 0; i < steps.size(); i++) {
            run_step(*rt.kernels, steps[i], batch, rt.queues[i]);
            rt.barrier.wait();
            if (nanoseconds && thread == 0) {
                const auto now = std::chrono::steady_clock::now();
                nanoseconds[steps[i].index] += std::chrono::nanoseconds(now - before).count();
                before = now;
            }
        }
    });
    return 0;
}

}  // namespace

extern "C" {

int32_t kv_abi_version(void) { return KV_ABI_VERSION; }

const char* kv_instruction_set(void) { return runtime().kernels->name; }

const char* kv_instruction_sets(void) {
    static const std::string names = [] {
        std::string all;
        for (const KernelTable* table : usable_tables()) {
            if (!all.empty()) all += ' ';
            all += table->name;
        }
        return all;
    }();
    return names.c_str();
}

int32_t kv_use_instruction_set(const char* name) {
    for (const KernelTable* table : usable_tables())
        if (!std::strcmp(table->name, name)) {
            runtime().kernels = table;
            return 0;
        }
    return -1;
}

int32_t kv_set_num_threads(int32_t num_threads) {
    runtime().pool.resize(num_threads);
    return runtime().pool.size();
}

int32_t kv_dequantize(const KvWeight* weight, int32_t first, int32_t count, float* out) {
    if (!valid_weight(weight) || first < 0 || count < 0 || first + count > weight->rows) return -1;
    runtime().kernels->dequantize(*weight, first, count, out);
    return 0;
}

int32_t kv_run(const KvOp* ops, int32_t num_ops, const KvBatch* batch) { return run(ops, num_ops, *batch, nullptr); }

int32_t kv_run_profiled(const KvOp* ops, int32_t num_ops, const KvBatch* batch, int64_t* nanoseconds) {
    return run(ops, num_ops, *batch, nanoseconds);
}

}  // extern "C"
