// Softmax of one row as this backend's own kernel computes it, so that what rounds to a tie there
// rounds to a tie here: 16 bytes of values a lane (READS: 8, or 4 in float32), a running maximum,
// butterflies from 16 down.
template <int N, int READS, class T>
FN void softmax_registers(const T* in, float (&p)[(N + 32 * READS - 1) / (32 * READS) * READS]) {
  constexpr int BLOCKS = (N + 32 * READS - 1) / (32 * READS);
  float top[BLOCKS], sum[BLOCKS], all = -INFINITY;
  const int lane = lane_id();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    float* v = p + b * READS;
    const int first = (b * 32 + lane) * READS;
    if (READS == 8 && N % 8 == 0 && sizeof(T) == 2) {
      const uint4 t = first < N ? load16_of_any(in + first) : make_uint4(0u, 0u, 0u, 0u);
      float f[8];
      to_floats(t, f);
#pragma unroll
      for (int i = 0; i < READS; ++i) v[i] = first < N ? f[i] : -INFINITY;
    } else {
#pragma unroll
      for (int i = 0; i < READS; ++i) v[i] = first + i < N ? to_float(in[first + i]) : -INFINITY;
    }
    float m = -3.402823466e+38f, s = 0.f;
#pragma unroll
    for (int i = 0; i < READS; ++i) m = fmaxf(m, v[i]);
#pragma unroll
    for (int i = 0; i < READS; ++i) s = s + fast_exp(v[i] - m);
    const float before = m;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) m = fmaxf(m, shuffle_xor(m, d));
    s = s * fast_exp(before - m);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) s = s + shuffle_xor(s, d);
    top[b] = m;
    sum[b] = s;
    all = fmaxf(all, m);
  }
  float s = 0.f;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) s = s + sum[b] * fast_exp(top[b] - all);
  s = 1.f / s;
#pragma unroll
  for (int i = 0; i < BLOCKS * READS; ++i) p[i] = fast_exp(p[i] - all) * s;
}
// The same of a row of at most 32 * READS values that stand in shared memory, in place, by one warp.
template <int N, int READS, class Rounded>
FN void softmax_shared(float* v, Rounded rounded) {
  static_assert(N <= 32 * READS, "one block");
  const int first = lane_id() * READS;
  float p[READS];
  warp_barrier();
  softmax_registers<N, READS>(v, p);
  warp_barrier();
#pragma unroll
  for (int i = 0; i < READS; ++i)
    if (first + i < N) v[first + i] = rounded(p[i]);
  warp_barrier();
}
