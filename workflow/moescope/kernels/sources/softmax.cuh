// Softmax of one row as this backend's own kernel computes it, so that what rounds to a tie
// there rounds to a tie here: eight values a lane, a running maximum, butterflies from 16 down.
template <int N>
FN void softmax_row(const float* in, float* out) {
  constexpr int BLOCKS = (N + 255) / 256;
  float top[BLOCKS], sum[BLOCKS];
  const int lane = lane_id();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    float m = -3.402823466e+38f, s = 0.f, v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = b * 256 + lane * 8 + i;
      v[i] = at < N ? in[at] : -INFINITY;
      m = fmaxf(m, v[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s = s + fast_exp(v[i] - m);
    const float before = m;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) m = fmaxf(m, shuffle_xor(m, d));
    s = s * fast_exp(before - m);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) s = s + shuffle_xor(s, d);
    top[b] = m;
    sum[b] = s;
  }
  float m = top[0], s = 0.f;
#pragma unroll
  for (int b = 1; b < BLOCKS; ++b) m = fmaxf(m, top[b]);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) s = s + sum[b] * fast_exp(top[b] - m);
  s = 1.f / s;
  for (int i = lane; i < N; i += 32) out[i] = fast_exp(in[i] - m) * s;
}
