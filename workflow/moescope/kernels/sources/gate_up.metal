  // Router and first half: every threadgroup chooses the experts for itself; a simdgroup takes
  // ROWS rows of gate and up. The order of every sum is fixed by the shape, never by the grid.
  threadgroup float vector[HIDDEN];
  threadgroup float score[ROUTER_E];
#if ROUTER_SELECT != 2
  threadgroup float logit[ROUTER_LOGITS];
#endif
#if ROUTER_BIAS || ROUTER_SELECT == 3
  threadgroup float choice[ROUTER_E];
#endif
  threadgroup u32 chosen[32];
  threadgroup float weight[32];
  const int tid = int(thread_position_in_threadgroup.x);
  const int lane = LANE, warp = int(simdgroup_index_in_threadgroup);
  device float* const mid = (device float*)middle;
  if (warp == 0) {
#include "route.body"
#include "weigh.body"
    if (threadgroup_position_in_grid.x == 0) {
      if (lane < ROUTER_K) {
        mid[MID_CHOSEN + lane] = as_float(chosen[lane]);
        mid[MID_WEIGHT + lane] = weight[lane];
      }
    }
  }
  for (int i = tid; i < HIDDEN; i += GROUPS * 32) vector[i] = load_x((device const u16*)x, i);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int tile = int(threadgroup_position_in_grid.x) * GROUPS + warp;
  if (tile < ROUTED_TILES + SHARED_TILES) {
    const bool routed = SHARED_TILES == 0 || tile < ROUTED_TILES;
    const int slot = routed ? tile / (WIDTH / ROWS) : ROUTER_K;
    const int row = (routed ? tile % (WIDTH / ROWS) : tile - ROUTED_TILES) * ROWS;
    const u32 expert = routed ? chosen[slot] : 0u;
    float gate[ROWS], up[ROWS];
    for (int r = 0; r < ROWS; ++r) gate[r] = up[r] = 0.f;
    for (int unit = lane; unit < HIDDEN / 16; unit += 32) {
      float xs[16], sum = 0.f;
      for (int i = 0; i < 16; ++i) sum += xs[i] = vector[unit * 16 + i];
      for (int r = 0; r < ROWS; ++r) {
        if (routed) {
          const u64 at = u64(expert) * WIDTH + row + r;
#if GATED
          gate[r] += row_share<GATE, HIDDEN>((device const u8*)gate_w, (device const u8*)gate_s,
                                             (device const u8*)gate_b, at, unit, xs, sum);
#endif
          up[r] += row_share<UP, HIDDEN>((device const u8*)up_w, (device const u8*)up_s,
                                         (device const u8*)up_b, at, unit, xs, sum);
        }
#if SHARED_TILES
        else {
          const u64 at = u64(row + r);
#if GATED
          gate[r] += row_share<SHARED_GATE, HIDDEN>(
              (device const u8*)shared_gate_w, (device const u8*)shared_gate_s,
              (device const u8*)shared_gate_b, at, unit, xs, sum);
#endif
          up[r] += row_share<SHARED_UP, HIDDEN>((device const u8*)shared_up_w, (device const u8*)shared_up_s,
                                                (device const u8*)shared_up_b, at, unit, xs, sum);
        }
#endif
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      float g = simd_sum(gate[r]), u = simd_sum(up[r]);
      if (lane == 0) {
        if (routed) {
#if EXPERT_SCALED
          g *= gate_global[expert];
          u *= up_global[expert];
#endif
#if EXPERT_BIASED
          if (GATED) g += to_float(gate_bias[u64(expert) * WIDTH + row + r]);
          u += to_float(up_bias[u64(expert) * WIDTH + row + r]);
#endif
        }
        float v = activate<ACTIVATION>(g, u, LIMIT, ALPHA);
#if SHARED_TILES
        if (!routed) {
#if SHARED_WEIGHT == 1
          v *= 1.f / (1.f + EXP(-to_float(shared_logit[0])));
#elif SHARED_WEIGHT == 2
          v *= weight[ROUTER_K + (row + r) / (SHARED_WIDTH / ROUTER_SHARED)];
#endif
        }
#endif
        mid[slot * WIDTH + row + r] = v;
      }
    }
  }
