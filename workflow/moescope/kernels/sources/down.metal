  // Second half and combine: a simdgroup takes ROWS rows of the output over all chosen experts and
  // the shared one. Partial sums stay float32; one rounding at the end.
  const int lane = LANE, warp = int(simdgroup_index_in_threadgroup);
  device const float* mid = (device const float*)middle;
  const int row = (int(threadgroup_position_in_grid.x) * GROUPS + warp) * ROWS;
  if (row < OUT) {
    float total[ROWS];
    for (int r = 0; r < ROWS; ++r) total[r] = 0.f;
    for (int k = 0; k < ROUTER_K; ++k) {
      const u32 expert = as_bits(mid[MID_CHOSEN + k]);
      const float factor = mid[MID_WEIGHT + k];
      float y[ROWS];
      for (int r = 0; r < ROWS; ++r) y[r] = 0.f;
      for (int unit = lane; unit < WIDTH / 16; unit += 32) {
        float xs[16], sum = 0.f;
        for (int i = 0; i < 16; ++i) sum += xs[i] = mid[k * WIDTH + unit * 16 + i];
        for (int r = 0; r < ROWS; ++r)
          y[r] += row_share<DOWN, WIDTH>((device const u8*)down_w, (device const u8*)down_s,
                                         (device const u8*)down_b, u64(expert) * OUT + row + r, unit, xs, sum);
      }
      for (int r = 0; r < ROWS; ++r) {
        float v = simd_sum(y[r]);
#if EXPERT_SCALED
        v *= down_global[expert];
#endif
#if EXPERT_BIASED
        v += to_float(down_bias[u64(expert) * OUT + row + r]);
#endif
        total[r] += factor * v;
      }
    }
#if SHARED_WIDTH
    float y[ROWS];
    for (int r = 0; r < ROWS; ++r) y[r] = 0.f;
    for (int unit = lane; unit < SHARED_WIDTH / 16; unit += 32) {
      float xs[16], sum = 0.f;
      for (int i = 0; i < 16; ++i) sum += xs[i] = mid[ROUTER_K * WIDTH + unit * 16 + i];
      for (int r = 0; r < ROWS; ++r)
        y[r] += row_share<SHARED_DOWN, SHARED_WIDTH>(
            (device const u8*)shared_down_w, (device const u8*)shared_down_s,
            (device const u8*)shared_down_b, u64(row + r), unit, xs, sum);
    }
    for (int r = 0; r < ROWS; ++r) total[r] += simd_sum(y[r]);
#endif
    if (lane == 0)
      for (int r = 0; r < ROWS; ++r) ((device u16*)out)[row + r] = from_float(total[r]);
  }
