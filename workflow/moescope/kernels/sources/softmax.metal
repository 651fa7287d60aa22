// Softmax of one row as this backend's own kernel computes it: four values a lane, 128 a simdgroup.
template <int N>
FN void softmax_row(TG const float* in, TG float* out) {
  constexpr int BLOCKS = (N + 127) / 128;
  const int lane = LANE;
  float top = -3.402823466e+38f;
  for (int i = lane; i < N; i += 32) top = max(top, in[i]);
  top = simd_max(top);
  float sum = 0.f;
  for (int b = 0; b < BLOCKS; ++b) {
    float s = 0.f;
    for (int i = 0; i < 4; ++i) {
      const int at = b * 128 + lane * 4 + i;
      if (at < N) s += fast_exp(in[at] - top);
    }
    s = simd_sum(s);
    if (lane == b) sum = s;
  }
  const float scale = 1.f / simd_sum(sum);
  for (int i = lane; i < N; i += 32) out[i] = fast_exp(in[i] - top) * scale;
}
