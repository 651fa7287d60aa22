// From router logits to the chosen experts and their weights, by one warp (32 lanes).
// Common to CUDA and Metal: FN, TG, shuffle, warp_max and the like come from the prelude.
// Values are rounded to the activation type wherever the model's own operations round them, so
// that equal values, and what they are resolved to, are the model's.
FN float round_to_activation(float v) {
#if TYPE == 1
  return as_float(round_bf16(v) << 16);
#else
  return half_to_float(round_half(v));
#endif
}
FN float round_to_type(float v) {  // nothing where the router works in float32
#if ROUTER_TYPE
  return round_to_activation(v);
#else
  return v;
#endif
}

FN u32 ordered(float v) {  // order of floats as order of unsigned integers
  const u32 b = as_bits(v + 0.0f);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// The K largest keys of the warp: key[i] is number AT(i), zero where there is none. Equals are
// resolved as an ascending sort by (value, index) does: the last K of that order (HIGH: the higher
// index wins), or the first K of the negated values (the lower wins). Slots come in that order too.
#define STRIDED(i) u32((i) * 32 + lane)
#if ROUTER_KEY_16  // 16-bit values: value and index in one key, half the reductions
FN u32 key_of(float v, u32 at) {
#if ROUTER_TYPE == 2
  const u32 h = round_half(v + 0.0f);
  const u32 o = h & 0x8000u ? ~h & 0xffffu : h | 0x8000u;
#else
  const u32 o = ordered(v) >> 16;
#endif
  return o << 16 | (ROUTER_HIGH ? at + 1u : 0xfffeu - at);
}
FN u32 index_of(u32 key) { return ROUTER_HIGH ? (key & 0xffffu) - 1u : 0xfffeu - (key & 0xffffu); }
FN float value_of(u32 key) {
  const u32 o = key >> 16, h = o & 0x8000u ? o & 0x7fffu : ~o & 0xffffu;
#if ROUTER_TYPE == 2
  return half_to_float(h);
#else
  return as_float(h << 16);
#endif
}
template <int PER, int K, bool HIGH>
FN void top_k(PRIVATE u32 (&key)[PER], int lane, TG u32* chosen) {
  for (int r = 0; r < K; ++r) {
    u32 best = key[0];
    for (int i = 1; i < PER; ++i) best = max(best, key[i]);
    best = warp_max(best);
    for (int i = 0; i < PER; ++i) key[i] = key[i] == best ? 0u : key[i];
    if (lane == 0) chosen[HIGH ? K - 1 - r : r] = index_of(best);
  }
}
#else
FN u32 key_of(float v, u32 at) { return ordered(v); }
FN float value_of(u32 key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
template <int PER, int K, bool HIGH>
FN void top_k(PRIVATE u32 (&key)[PER], int lane, TG u32* chosen) {
  for (int r = 0; r < K; ++r) {
    u32 best = key[0];
    for (int i = 1; i < PER; ++i) best = max(best, key[i]);
    best = warp_max(best);
    u32 mine = HIGH ? 0u : 0xffffffffu;
    for (int i = 0; i < PER; ++i)
      if (key[i] == best) mine = HIGH ? max(mine, STRIDED(i) + 1u) : min(mine, STRIDED(i));
    const u32 at = HIGH ? warp_max(mine) - 1u : warp_min(mine);
    for (int i = 0; i < PER; ++i)
      if (STRIDED(i) == at) key[i] = 0u;
    if (lane == 0) chosen[HIGH ? K - 1 - r : r] = at;
  }
}
#endif

#define SCORE_LOGIT 0
#define SCORE_SOFTMAX 1
#define SCORE_SIGMOID 2
#define SCORE_SQRT_SOFTPLUS 3
FN float sigmoid(float v) {  // as MLX writes it, step by step
  const float y = round_to_type(1.f / round_to_type(1.f + round_to_type(EXP(fabs(v)))));
  return v < 0.f ? y : round_to_type(1.f - y);
}
FN float score_of(float logit) {
#if ROUTER_SCORE == SCORE_SIGMOID
  return sigmoid(logit);
#elif ROUTER_SCORE == SCORE_SQRT_SOFTPLUS
  return SQRT(max(logit, 0.f) + LOG1P(EXP(-fabs(logit))));
#else
  return logit;
#endif
}

#define WEIGHT_SCORE 0
#define WEIGHT_SUM 1
#define WEIGHT_SOFTMAX 2
#define WEIGHT_SOFTMAX_LOOSE 3
#define WEIGHT_LOGSIGMOID 4
// The weights of the chosen, lane k holding slot k's score; every lane calls.
FN float weight_of(float s, int lane) {
#if ROUTER_WEIGHT == WEIGHT_SUM
  // The sum as MLX's reduction makes it: a thread for 16 bytes, each sum rounded, then butterflies.
  constexpr int READS = ROUTER_TYPE ? 8 : 4;
  float sum[8];
  for (int t = 0; t < 8; ++t) {
    sum[t] = 0.f;
    for (int k = t * READS; k < ROUTER_K && k < (t + 1) * READS; ++k)
      sum[t] = round_to_type(sum[t] + shuffle(s, k));
  }
  for (int d = 4; d > 0; d >>= 1)
    for (int t = 0; t < d; ++t) sum[t] = round_to_type(sum[t] + sum[t + d]);
  return round_to_type(s / round_to_type(sum[0] + ROUTER_EPSILON));
#elif ROUTER_WEIGHT == WEIGHT_SOFTMAX
  float top = shuffle(s, 0), sum = 0.f;
  for (int k = 1; k < ROUTER_K; ++k) top = max(top, shuffle(s, k));
  const float e = fast_exp(s - top);
  for (int k = 0; k < ROUTER_K; ++k) sum += shuffle(e, k);
  return round_to_type(e * (1.f / sum));
#elif ROUTER_WEIGHT == WEIGHT_SOFTMAX_LOOSE  // every step in the activation type
  float top = shuffle(s, 0), sum = 0.f;
  for (int k = 1; k < ROUTER_K; ++k) top = max(top, shuffle(s, k));
  const float e = round_to_type(fast_exp(round_to_type(s - top)));
  for (int k = 0; k < ROUTER_K; ++k) sum = round_to_type(sum + shuffle(e, k));
  return round_to_type(e * round_to_type(1.f / sum));
#else
  return s;
#endif
}
