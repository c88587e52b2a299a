// Says which operations this library can run, so that running them needs no second look.
#include "isa.h"
#include "tiles.h"

bool valid_weight(const KvWeight* w) {
    return w && w->data && kv_packed_bytes(w->format, w->rows, w->columns) > 0;
}

namespace {

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

}  // namespace

extern "C" int32_t kv_check(const KvOp* ops, int32_t num_ops) {
    for (int32_t i = 0; i < num_ops; i++)
        if (!valid(ops[i])) return -1 - i;
    return 0;
}
