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

// A run of a list of operations. All threads share a step's work; what is one thread's is done by the last that
// leaves the step before. A thread whose core another program has borrowed holds up the others only if it was in the
// middle of a chunk: who finds the run over when it comes back, leaves it without having touched anything else.
struct StepRun {
    std::vector<Step> steps;
    std::vector<WorkQueue> queues;
    const KernelTable* kernels = nullptr;
    const KvBatch* batch = nullptr;
    Stopwatch stopwatch{nullptr};
    std::atomic<size_t> current{0};
    Job job{[this] { work(); }};

    size_t run_alone(size_t i) {
        for (; i < steps.size() && steps[i].alone; i++) {
            run_step(*kernels, steps[i], *batch);
            stopwatch.stop(steps[i]);
        }
        return i;
    }

    void work() {
        for (size_t i; (i = current.load(std::memory_order_acquire)) < steps.size();) {
            WorkQueue& queue = *steps[i].queues;
            if (queue.enter()) {
                run_step(*kernels, steps[i], *batch);
                if (queue.leave()) {
                    stopwatch.stop(steps[i]);
                    current.store(run_alone(i + 1), std::memory_order_release);
                    continue;
                }
            }
            spin_until([&] { return current.load(std::memory_order_acquire) != i; });
        }
    }
};

// Buffers whose memory is kept from run to run. Runs take turns, so that a thread may still be leaving the last one.
struct Runtime {
    std::mutex mutex;
    const KernelTable* kernels = usable_tables().front();
    std::deque<AttentionPlan> plans;
    StepRun runs[2];
    int turn = 0;
    Job shared;                       // for work that is no list of operations
    std::vector<int16_t> activation;  // of a matrix product that is not part of a program
    std::vector<float> scales;
    ThreadPool pool;  // its threads end before what they work on
};

Runtime& runtime() {
    static Runtime instance;
    return instance;
}

// The caller holds the runtime's mutex and has checked the operations.
void run(const KvOp* ops, int32_t num_ops, const KvBatch& batch, int64_t* nanoseconds) {
    Runtime& rt = runtime();
    StepRun& current = rt.runs[rt.turn ^= 1];
    current.job.settle();
    size_t num_plans = 0, queues = 0;
    std::vector<Step>& steps = current.steps;
    steps.clear();
    for (int32_t i = 0; i < num_ops; i++) {
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
    if (current.queues.size() < queues) current.queues = std::vector<WorkQueue>(queues);
    WorkQueue* next = current.queues.data();
    for (size_t i = 0; i < queues; i++) next[i].reset(rt.pool.size());
    for (Step& step : steps) {
        step.queues = next;
        next += num_queues(*step.op);
    }
    current.kernels = rt.kernels;
    current.batch = &batch;
    current.stopwatch = Stopwatch(nanoseconds);
    current.stopwatch.start();
    const size_t first = current.run_alone(0);
    current.current.store(first, std::memory_order_relaxed);
    if (first < steps.size()) rt.pool.run(current.job);
}

}  // namespace

void with_kernels(bool on_all_threads, const std::function<void(const KernelTable&)>& work) {
    Runtime& rt = runtime();
    const std::lock_guard<std::mutex> turn(rt.mutex);
    const KernelTable& kernels = *rt.kernels;
    if (on_all_threads)
        rt.pool.run_to_the_end(rt.shared, [&] { work(kernels); });
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

void kv_run(const KvOp* ops, int32_t num_ops, const KvBatch* batch) {
    const std::lock_guard<std::mutex> turn(runtime().mutex);
    run(ops, num_ops, *batch, nullptr);
}

void kv_run_profiled(const KvOp* ops, int32_t num_ops, const KvBatch* batch, int64_t* nanoseconds) {
    const std::lock_guard<std::mutex> turn(runtime().mutex);
    run(ops, num_ops, *batch, nanoseconds);
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
        if (kv_check(ops + plain, 2 - plain) != 0) return -1;
        run(ops + plain, 2 - plain, batch, nullptr);
    }
    return 0;
}

}  // extern "C"
