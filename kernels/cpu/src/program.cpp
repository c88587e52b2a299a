// Runs a list of operations on the thread pool, and chooses the instruction set.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "isa.h"
#include "threads.h"
#include "tiles.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

// Fixed, whatever the batch and the number of threads: the order of summation, and so
// a token's result, must not depend on its neighbours.
constexpr int KEYS_PER_SPLIT = 256;
constexpr int MAX_QUERIES = 32;
constexpr int MAX_NORMED = 16384;

bool supported([[maybe_unused]] const char* name) {
#if defined(__aarch64__) && defined(__linux__)
    const unsigned long needed = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    if (!std::strcmp(name, "neon")) return (getauxval(AT_HWCAP) & needed) == needed;
#elif defined(__x86_64__) || defined(_M_X64)
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
    if (supported("neon")) tables.push_back(&kv_neon::table);
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
    std::mutex mutex;
    ThreadPool pool;
    const KernelTable* kernels = usable_tables().front();
    std::deque<AttentionPlan> plans;
    std::vector<WorkQueue> queues;
    std::vector<int16_t> activation;  // of a matrix product that is not part of a program
    std::vector<float> scales;
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

bool valid_matmul(const KvOp& op, const KvWeight* weight) {
    if (!valid_weight(weight) || op.activation->columns != weight->columns) return false;
    const int format = weight->format, kind = op.activation->kind;
    if (!is_dense(format) && !(op.activation->scales && op.activation->scaled_sums)) return false;
    const bool readable = is_dense(format)           ? kind == KV_ACT_F32
                          : multiplies_bytes(format) ? kind == KV_ACT_INT8 || kind == KV_ACT_BYTE_PAIR
                                                     : kind == KV_ACT_INT16;
    return readable && !(is_paired(op) && weight->rows % (2 * KV_TILE));
}

bool valid_routing(const KvRouting* r) {
    return r && r->num_experts > 0 && r->num_chosen > 0 && r->num_chosen <= r->num_experts && r->first_share &&
           r->shares && r->places && r->weights;
}

bool valid(const KvOp& op) {
    switch (op.kind) {
        case KV_OP_EMBED: return valid_weight(op.weight) && op.output;
        case KV_OP_NORM:
        case KV_OP_QUANTIZE:
        case KV_OP_GATHER:
            if (!op.input || op.columns <= 0 || op.columns % KV_GROUP) return false;
            if (op.kind == KV_OP_NORM && op.columns > MAX_NORMED) return false;
            if (op.kind == KV_OP_GATHER && !valid_routing(op.routing)) return false;
            return op.activation ? op.activation->columns == op.columns : op.kind == KV_OP_NORM && op.output;
        case KV_OP_MATMUL: return op.activation && op.output && valid_matmul(op, op.weight);
        case KV_OP_EXPERT_MATMUL:
            if (!op.activation || !op.output || !op.weight || !valid_routing(op.routing)) return false;
            for (int e = 0; e < op.routing->num_experts; e++)
                if (!valid_matmul(op, op.weight + e) || op.weight[e].rows != op.weight->rows) return false;
            return true;
        case KV_OP_ROUTE: return op.input && valid_routing(op.routing);
        case KV_OP_COMBINE:
            return op.input && op.output && op.columns > 0 && op.columns % 8 == 0 && valid_routing(op.routing);
        case KV_OP_ROPE_KV:
        case KV_OP_ATTENTION: {
            const KvAttentionSpec* a = op.attention;
            return a && a->num_kv_heads > 0 && a->num_heads % a->num_kv_heads == 0 &&
                   a->num_heads / a->num_kv_heads <= MAX_QUERIES && a->head_dim % 8 == 0 && a->head_dim <= 256 &&
                   a->rotary_dim % 2 == 0 && a->rotary_dim >= 0 && a->rotary_dim <= a->head_dim &&
                   (a->rotary_dim == 0 || (a->cos && a->sin)) && a->block_size > 0 && a->block_size % 8 == 0 &&
                   a->block_size <= 64 && 64 % a->block_size == 0 && a->keys && a->values &&
                   (a->cache_kind != KV_CACHE_INT8 || (a->key_scales && a->value_scales)) && op.output &&
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
    WorkQueue* queues;  // one, or one for each expert
    bool alone;         // work of one thread
};

int num_queues(const KvOp& op) { return op.kind == KV_OP_EXPERT_MATMUL ? op.routing->num_experts : 1; }

void run_step(const KernelTable& k, const Step& step, const KvBatch& batch) {
    const KvOp& op = *step.op;
    WorkQueue& queue = *step.queues;
    const int32_t rows = op.on_selected ? batch.num_selected : batch.num_rows;
    switch (op.kind) {
        case KV_OP_EMBED: return k.embed(op, batch, queue);
        case KV_OP_NORM: return k.norm(op, rows, queue);
        case KV_OP_QUANTIZE: return k.quantize(op, op.routing ? rows * op.routing->num_chosen : rows, queue);
        case KV_OP_MATMUL: return k.matmul(op, rows, queue);
        case KV_OP_EXPERT_MATMUL: return k.expert_matmul(op, step.queues);
        case KV_OP_ROUTE: return k.route(op, rows, queue);
        case KV_OP_GATHER: return k.gather(op, rows, queue);
        case KV_OP_COMBINE: return k.combine(op, rows, queue);
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

// Whether only one thread has something to do, as it is with all that comes by rows when there is one row.
bool is_done_alone(const KvOp& op, const KvBatch& batch) {
    if (op.kind == KV_OP_MATMUL || op.kind == KV_OP_EXPERT_MATMUL || op.kind == KV_OP_ATTENTION) return false;
    const bool of_shares = op.kind == KV_OP_GATHER || (op.kind == KV_OP_QUANTIZE && op.routing);
    const int32_t rows = op.on_selected || op.kind == KV_OP_SELECT ? batch.num_selected : batch.num_rows;
    return op.kind == KV_OP_ROUTE || (of_shares ? rows * op.routing->num_chosen : rows) == 1;
}

// Adds up how long each step takes, whichever thread is at it.
class Stopwatch {
  public:
    explicit Stopwatch(int64_t* nanoseconds) : nanoseconds_(nanoseconds) {}
    void start() {
        if (nanoseconds_) before_ = Clock::now();
    }
    void stop(const Step& step) {
        if (!nanoseconds_) return;
        const auto now = Clock::now();
        nanoseconds_[step.index] += std::chrono::nanoseconds(now - before_).count();
        before_ = now;
    }

  private:
    using Clock = std::chrono::steady_clock;
    int64_t* nanoseconds_;
    Clock::time_point before_;
};

// All threads share a step's work; what is one thread's is done by the last that leaves the step before. A thread
// whose core another program has borrowed holds up the others only if it was in the middle of a chunk.
void run_steps(Runtime& rt, const std::vector<Step>& steps, const KvBatch& batch, int64_t* nanoseconds) {
    Stopwatch stopwatch(nanoseconds);
    const auto run_alone = [&](size_t i) {
        for (; i < steps.size() && steps[i].alone; i++) {
            run_step(*rt.kernels, steps[i], batch);
            stopwatch.stop(steps[i]);
        }
        return i;
    };
    stopwatch.start();
    const size_t first = run_alone(0);
    if (first == steps.size()) return;
    std::atomic<size_t> current{first};
    rt.pool.run([&](int) {
        for (size_t i = first; i < steps.size(); i = current.load(std::memory_order_acquire)) {
            WorkQueue& queue = *steps[i].queues;
            if (queue.enter()) {
                run_step(*rt.kernels, steps[i], batch);
                if (queue.leave()) {
                    stopwatch.stop(steps[i]);
                    current.store(run_alone(i + 1), std::memory_order_release);
                    continue;
                }
            }
            spin_until([&] { return current.load(std::memory_order_acquire) != i; });
        }
    });
}

// The caller holds the runtime's mutex.
int32_t run(const KvOp* ops, int32_t num_ops, const KvBatch& batch, int64_t* nanoseconds) {
    Runtime& rt = runtime();
    size_t num_plans = 0, queues = 0;
    std::vector<Step> steps;
    steps.reserve(num_ops + 64);
    for (int32_t i = 0; i < num_ops; i++) {
        if (!valid(ops[i])) return -1 - i;
        Step step{&ops[i], i, nullptr, false, nullptr, is_done_alone(ops[i], batch)};
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
            step.alone = batch.num_rows == 1;
            if (!plan->any_split) continue;
        }
        steps.push_back(step);
    }
    for (const Step& step : steps) queues += num_queues(*step.op);
    if (rt.queues.size() < queues) rt.queues = std::vector<WorkQueue>(queues);
    WorkQueue* next = rt.queues.data();
    for (size_t i = 0; i < queues; i++) next[i].reset(rt.pool.size());
    for (Step& step : steps) {
        step.queues = next;
        next += num_queues(*step.op);
    }
    run_steps(rt, steps, batch, nanoseconds);
    return 0;
}

}  // namespace

void with_kernels(bool on_all_threads, const std::function<void(const KernelTable&)>& work) {
    Runtime& rt = runtime();
    const std::lock_guard<std::mutex> turn(rt.mutex);
    const KernelTable& kernels = *rt.kernels;
    if (on_all_threads)
        rt.pool.run([&](int) { work(kernels); });
    else
        work(kernels);
}

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
    const std::lock_guard<std::mutex> turn(runtime().mutex);
    for (const KernelTable* table : usable_tables())
        if (!std::strcmp(table->name, name)) {
            runtime().kernels = table;
            return 0;
        }
    return -1;
}

int32_t kv_set_num_threads(int32_t num_threads) {
    const std::lock_guard<std::mutex> turn(runtime().mutex);
    runtime().pool.resize(num_threads);
    return runtime().pool.size();
}

int32_t kv_dequantize(const KvWeight* weight, int32_t first, int32_t count, float* out) {
    if (!valid_weight(weight) || first < 0 || count < 0 || first + count > weight->rows) return -1;
    runtime().kernels->dequantize(*weight, first, count, out);
    return 0;
}

int32_t kv_run(const KvOp* ops, int32_t num_ops, const KvBatch* batch) {
    const std::lock_guard<std::mutex> turn(runtime().mutex);
    return run(ops, num_ops, *batch, nullptr);
}

int32_t kv_run_profiled(const KvOp* ops, int32_t num_ops, const KvBatch* batch, int64_t* nanoseconds) {
    const std::lock_guard<std::mutex> turn(runtime().mutex);
    return run(ops, num_ops, *batch, nanoseconds);
}

int32_t kv_matmul(const KvWeight* weight, int32_t activation, const float* x, int32_t num_rows, const float* bias,
                  float* out) {
    if (!valid_weight(weight) || num_rows < 0) return -1;
    Runtime& rt = runtime();
    const std::lock_guard<std::mutex> turn(rt.mutex);
    const int columns = weight->columns, groups = columns / KV_GROUP;
    const bool plain = activation == KV_ACT_F32;
    // Weights stream past 64 rows at a time anyway: more at once would only take memory.
    const int most = std::min(num_rows, 256), padded = (most + KV_PANEL - 1) / KV_PANEL * KV_PANEL;
    if (!plain) {
        rt.activation.resize(std::max(rt.activation.size(), size_t(padded) * columns));
        rt.scales.resize(std::max(rt.scales.size(), 3 * size_t(padded) * groups));
    }
    for (int first = 0; first < num_rows; first += most) {
        const float* rows = x + int64_t(first) * columns;
        KvActivationBuffer buffer{activation, columns, rt.activation.data(), rt.scales.data(),
                                  rt.scales.data() + size_t(padded) * groups};
        if (plain) buffer.values = const_cast<float*>(rows);
        KvOp ops[2] = {};
        ops[0].kind = KV_OP_QUANTIZE;
        ops[0].columns = columns;
        ops[0].input = rows;
        ops[0].activation = &buffer;
        ops[1].kind = KV_OP_MATMUL;
        ops[1].factor = 1.0f;
        ops[1].output = out + int64_t(first) * weight->rows;
        ops[1].bias = bias;
        ops[1].weight = weight;
        ops[1].activation = &buffer;
        KvBatch batch{};
        batch.num_rows = std::min(most, num_rows - first);
        if (run(ops + plain, 2 - plain, batch, nullptr) != 0) return -1;
    }
    return 0;
}

}  // extern "C"
