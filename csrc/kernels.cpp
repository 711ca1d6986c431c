// One instruction set's kernels. This file is compiled once per variant, with that variant's flags.
#include "append.h"
#include "attend.h"
#include "dequant.h"
#include "expand.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "packed.h"

namespace KVIST_VARIANT {

static void exec(const Op& op, const Step& step, Team& team) {
  switch (op.kind) {
    case OpKind::embed: embed(op, step, team); break;
    case OpKind::linear: linear(op, step, team); break;
    case OpKind::append: append(op, step, team); break;
    case OpKind::attend: attend(op, step, team); break;
    case OpKind::append_latent: append_latent(op, step, team); break;
    case OpKind::attend_expanded: attend_expanded(op, step, team); break;
    case OpKind::grouped: grouped(op, step, team); break;
    case OpKind::route: route(op, step, team); break;
    case OpKind::combine: combine(op, step, team); break;
    case OpKind::norm_add: case OpKind::normalise: norm_add(op, step, team); break;
  }
}

static size_t common_bytes(const Op& op, const Step& step) {
  if (op.kind == OpKind::linear) return linear_common(op, step);
  if (op.kind == OpKind::attend) return attend_common(op, step);
  if (op.kind == OpKind::grouped) return grouped_common(op, step);
  return 0;
}

extern const Kernels table;
#define KV_TEXT(x) #x
#define KV_NAME(x) KV_TEXT(x)
const Kernels table = {KV_NAME(KVIST_VARIANT), exec, common_bytes, pack, unpack_row, strip_bytes, tile_row, gguf::row_bytes, gguf::row};

}  // namespace KVIST_VARIANT
