// Row-wise operations: normalisation, embedding, activation. Each row's bits depend on that row alone.
#pragma once
#include "abi.h"
#include "simd.h"

namespace KVIST_VARIANT {
using namespace kvist;

KV_INLINE vf load_some(const float* x, int64_t count) {  // fewer than LANES; the rest are zero
  float t[LANES] = {};
  for (int64_t i = 0; i < count; ++i) t[i] = x[i];
  return load(t);
}
KV_INLINE void store_some(float* x, vf a, int64_t count) {
  float t[LANES]; store(t, a);
  for (int64_t i = 0; i < count; ++i) x[i] = t[i];
}

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019). Squares are summed in four interleaved vectors.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out) {
  vf sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) { vf v = load(x + i + j * LANES); sum[j] = fma(v, v, sum[j]); }
  for (; i + LANES <= width; i += LANES) { vf v = load(x + i); sum[0] = fma(v, v, sum[0]); }
  if (i < width) { vf v = load_some(x + i, width - i); sum[0] = fma(v, v, sum[0]); }
  float mean = lane_sum(add(add(sum[0], sum[1]), add(sum[2], sum[3]))) / float(width);
  vf inverse = set1(1.0f / std::sqrt(mean + eps));
  for (i = 0; i + LANES <= width; i += LANES) store(out + i, mul(mul(load(x + i), inverse), load(weight + i)));
  if (i < width) {
    vf y = mul(mul(load_some(x + i, width - i), inverse), load_some(weight + i, width - i));
    store_some(out + i, y, width - i);
  }
}

KV_INLINE float wide_sum(const vf (&sum)[4]) { return lane_sum(add(add(sum[0], sum[1]), add(sum[2], sum[3]))); }

// out = (x - mean) / sqrt(var + eps) * weight + bias (Ba, Kiros and Hinton, 2016; bias may be null). Two passes in the same
// four interleaved vectors: the mean is known before the squares are taken.
inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t width, float* out) {
  vf sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) { vf& s = sum[i / LANES % 4]; s = add(s, load(x + i)); }
  if (i < width) sum[0] = add(sum[0], load_some(x + i, width - i));
  const vf mean = set1(wide_sum(sum) / float(width));
  for (int j = 0; j < 4; ++j) sum[j] = zero();
  for (i = 0; i + LANES <= width; i += LANES) { vf v = sub(load(x + i), mean); vf& s = sum[i / LANES % 4]; s = fma(v, v, s); }
  if (i < width) {
    float t[LANES] = {};
    store_some(t, sub(load_some(x + i, width - i), mean), width - i);  // lanes beyond the row stay 0
    sum[0] = fma(load(t), load(t), sum[0]);
  }
  const vf inverse = set1(1.0f / std::sqrt(wide_sum(sum) / float(width) + eps));
  for (i = 0; i < width; i += LANES) {
    const int64_t count = width - i;
    const bool whole = count >= LANES;
    vf y = sub(whole ? load(x + i) : load_some(x + i, count), mean);
    y = mul(mul(y, inverse), whole ? load(weight + i) : load_some(weight + i, count));
    if (bias) y = add(y, whole ? load(bias + i) : load_some(bias + i, count));
    if (whole) store(out + i, y);
    else store_some(out + i, y, count);
  }
}

// The norm that `op` names, of one row.
inline void row_norm(const Op& op, const float* x, int64_t width, float* out) {
  if (op.centred) layer_norm(x, op.norm, op.norm_bias, op.eps, width, out);
  else rms_norm(x, op.norm, op.eps, width, out);
}

KV_INLINE vf silu(vf x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
KV_INLINE vf gelu_tanh(vf x) {
  vf inner = mul(set1(0.7978845608028654f), mul(x, fma(mul(x, x), set1(0.044715f), set1(1.0f))));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}
KV_INLINE vf gelu(vf x) { return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.70710678118654752f))))); }
KV_INLINE vf activate(Activation a, vf x) { return a == Activation::silu ? silu(x) : a == Activation::gelu ? gelu(x) : gelu_tanh(x); }
KV_INLINE vf cap(vf x, float limit) { return mul(set1(limit), tanh(div(x, set1(limit)))); }

inline void unpack_row(const Weight& w, int64_t row, float* out);  // linear.h

inline void embed(const Op& op, const Step& step, Team& team) {
  const Weight& w = op.weight;
  share(team, step.num_tokens, 1, [&](int64_t t) {
    float* out = (float*)op.out + t * op.out_stride;
    unpack_row(w, step.tokens[t], out);
    for (int64_t i = 0; i < w.k; ++i) out[i] = out[i] * op.scale;
    if (!op.places.data) return;
    float* place = (float*)team.own->at(size_t(w.k) * 4);
    unpack_row(op.places, step.positions[t], place);
    for (int64_t i = 0; i < w.k; ++i) out[i] = out[i] + place[i];
  });
}

inline void norm_add(const Op& op, const Step& step, Team& team) {
  const int64_t width = op.weight.k;
  float* y = (float*)team.own->at(width * 4);
  share(team, step.num_tokens, 4, [&](int64_t i) {
    row_norm(op, (const float*)op.source + i * op.source_stride, width, y);
    float* out = (float*)op.out + i * op.out_stride;
    if (op.kind == OpKind::normalise) std::memcpy(out, y, size_t(width) * 4);
    else for (int64_t j = 0; j < width; ++j) out[j] = out[j] + y[j];
  });
}

}  // namespace KVIST_VARIANT
