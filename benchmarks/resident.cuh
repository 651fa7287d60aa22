// Pieces of the kernel that resident.py makes, each behind its name.
//: CUDA
// Copies by the engine: barriers that count arrivals and bytes.
FN void arrivals(u64* at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(count) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
FN void expect(u64* at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(at)), "r"(bytes) : "memory");
}
FN void order(void* to, const void* from, u32 bytes, u64* at) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
               "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(at)) : "memory");
}
FN void wait_arrivals(u64* at) {
  u64 begun = 0;
  for (u32 turn = 0, there = 0;; ++turn) {
    asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p;}"
                 : "=r"(there) : "r"(shared_address(at)) : "memory");
    if (there) return;
    patience(turn, begun);
  }
}
//: SHIM
// The same on a CPU: late orders land when they are waited for.
struct Order { void* to; const void* from; u32 bytes; u64* at; };
static thread_local Order orders[4096];
static thread_local int orders_made;
inline void arrivals(u64* at, u32 count) { *at = u64(count) << 32; }
inline void expect(u64* at, u32 bytes) { *at += u64(bytes) - (1ull << 32); }
inline void land(Order& o) {
  memcpy(o.to, o.from, o.bytes);
  *o.at -= o.bytes;
  o.bytes = 0;
}
inline void order(void* to, const void* from, u32 bytes, u64* at) {
  lanes::aligned(to, 16, "an order to shared memory", __FILE__, __LINE__);
  lanes::aligned(from, 16, "an order from global memory", __FILE__, __LINE__);
  lanes::aligned((const void*)(uintptr_t)bytes, 16, "an order's size", __FILE__, __LINE__);
  if (orders_made == 4096) abort();
  orders[orders_made] = {to, from, bytes, at};
  if (!lanes::block.late) land(orders[orders_made]);
  else ++orders_made;
}
inline void wait_arrivals(u64* at) {
  for (;;) {
    for (int i = 0; i < orders_made; ++i) if (orders[i].at == at && orders[i].bytes) land(orders[i]);
    if (*at == 0) return;
    lanes::yield();
  }
}
//: ROWS
// Sixteen rows as they lie in memory, U steps of them: `near` is this lane's row of the first eight, `far` of the
// second; of odd rows the other way round. scale_of(u, far, s, t): scale and bias of this lane's chunk.
template <class W, int U, class OctetOf, class SumOf, class ScaleOf>
FN void rows_as_they_lie(const u8* near, const u8* far, OctetOf octet, SumOf sum_of, ScaleOf scale_of, float& a, float& b) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const uint4 va = *(const uint4*)(near + u * 64), vb = *(const uint4*)(far + u * 64);
    const u32 wa[4] = {va.x, va.y, va.z, va.w}, wb[4] = {vb.x, vb.y, vb.z, vb.w};
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = octet(u, i);
      u32 pa[4], pb[4];
      W::octet(wa, i, pa);
      W::octet(wb, i, pb);
      if (i < 2) {
        mma(c, pa[0], pb[0], pa[1], pb[1], v.x, v.y);
        mma(c, pa[2], pb[2], pa[3], pb[3], v.z, v.w);
      } else {
        mma(d, pa[0], pb[0], pa[1], pb[1], v.x, v.y);
        mma(d, pa[2], pb[2], pa[3], pb[3], v.z, v.w);
      }
    }
    float x0 = 0.f, x1 = 0.f, s, t;
    sum_of(u, x0, x1);
    scale_of(u, 0, s, t);
    a += s * ((c[0] + d[0]) + (c[1] + d[1]));
    a += (t - W::OFFSET * s) * (x0 + x1);
    scale_of(u, 1, s, t);
    b += s * ((c[2] + d[2]) + (c[3] + d[3]));
    b += (t - W::OFFSET * s) * (x0 + x1);
  }
}
//: BEGIN
alignas(16) __shared__ u64 arrived[PLACES + ROUTER_K];
u8* const downs_at = rings + PLACES * TILE_PLACE;
u8* const scales_at = downs_at + ROUTER_K * DOWN_PLACE + warp * (TURNS * SCALES_PLACE);
u8* const down_scales_at = downs_at + ROUTER_K * DOWN_PLACE + BLOCK_WARPS * (TURNS * SCALES_PLACE) + warp * DOWN_SCALES_PLACE;
if (tid < PLACES + ROUTER_K) arrivals(arrived + tid, tid < PLACES ? 2u : 1u);
//: SEND
// Each warp asks for its own scales; gate's and up's weights of a tile are two orders, of two warps.
#pragma unroll
for (int n = 0; n < TURNS; ++n) {
  if (n < mine) {
    const int tile = tile_of(n), kind = lane >> 3;
    const u64 row = u64(chosen[tile / (WIDTH / 8)]) * WIDTH + tile % (WIDTH / 8) * 8;
    const u8* const from = (const u8*)(kind & 2 ? kind & 1 ? up_b : up_s : kind & 1 ? gate_b : gate_s);
    copy16(scales_at + n * SCALES_PLACE + lane * 16, from + (row + (lane & 7)) * (HIDDEN / 32) + part_of * 16, true);
    if (lane == 0 && part_of < 2) {
      u64* const count = arrived + group + n * TILES;
      expect(count, EIGHT_ROWS);
      order(rings + (group + n * TILES) * TILE_PLACE + part_of * (EIGHT_ROWS + 64),
            (const u8*)(part_of ? up_w : gate_w) + row * (HIDDEN / 2), EIGHT_ROWS, count);
    }
  }
  commit_copies();
}
const auto send_down = [&] {
  if (down_mine > 0) {
    const u64 row = u64(chosen[down_slot]) * OUT + blockIdx.x * 16;
    for (int at = lane * 16; at < WIDTH / 2; at += 512) {
      copy16(down_scales_at + at, (const u8*)down_s + row * (WIDTH / 32) + at, true);
      copy16(down_scales_at + WIDTH / 2 + at, (const u8*)down_b + row * (WIDTH / 32) + at, true);
    }
    if (lane == 0) {
      u64* const count = arrived + PLACES + down_part;
      u8* const to = downs_at + down_part * DOWN_PLACE;
      const u8* const from = (const u8*)down_w + row * (WIDTH / 2);
      expect(count, 2 * DOWN_EIGHT);
      order(to, from, DOWN_EIGHT, count);
      order(to + DOWN_EIGHT + 64, from + DOWN_EIGHT, DOWN_EIGHT, count);
    }
  }
  commit_copies();
};
if (SEND_DOWN == 0) send_down();
//: FIRST
// A tile of the first half.
float a = 0.f, b = 0.f;
{
  if (n == 0) wait_copies<TURNS - 1 + (SEND_DOWN < 2)>();
  else wait_copies<1>();
  warp_barrier();
  wait_arrivals(arrived + group + n * TILES);
  if (SEND_DOWN == 2 && n == 0) send_down();
  const bool odd = g & 1;
  const u8* const place = rings + (group + n * TILES) * TILE_PLACE + g * (HIDDEN / 2) + begin * 64 + (lane & 3) * 16;
  const u8* const vector = operand + begin * 256 + gives_at<1>(lane);
  const auto octet = [&](int u, int i) {
    read16_if(live, vector + u * 256 + i * 64, held[i]);
    return held[i];
  };
  const auto sum_of = [&](int u, float& x0, float& x1) {
    const float2 t = *(const float2*)(sums + (begin + u) * 4 + pair * 2);
    x0 = t.x * real;
    x1 = t.y * real;
  };
  u32 words[2][2][4];  // near and far: scales, biases
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = *(const uint4*)(scales_at + n * SCALES_PLACE + ((i ^ (odd ? 2 : 0)) * 8 + g) * 16);
    u32* const to = words[i >> 1][i & 1];
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  const auto scale_of = [&](int u, int far, float& s, float& t) {
    s = as_float(pair ? words[far][0][u] & 0xffff0000u : words[far][0][u] << 16);
    t = as_float(pair ? words[far][1][u] & 0xffff0000u : words[far][1][u] << 16);
  };
  rows_as_they_lie<UP::W, STEPS_EACH>(place + (odd ? EIGHT_ROWS + 64 : 0), place + (odd ? 0 : EIGHT_ROWS + 64), octet, sum_of, scale_of, a, b);
  const float kept = a;
  a = odd ? b : a;
  b = odd ? kept : b;
}
//: SECOND
// Sixteen rows of the second half.
{
  wait_copies<0>();
  warp_barrier();
  wait_arrivals(arrived + PLACES + down_part);
  const int row = lane >> 2;
  const bool odd = row & 1;
  const u8* const place = downs_at + down_part * DOWN_PLACE + row * (WIDTH / 2) + (lane & 3) * 16;
  const u8* const vector = given + gives_at<2>(lane);
  const float* const sums_of = (const float*)(given + GIVEN_STEPS * 512);
  const auto octet = [&](int u, int i) {
    read16_if(down_live, vector + u * 512 + i * 128, down_held[i]);
    return down_held[i];
  };
  const auto sum_of = [&](int u, float& x0, float& x1) {
    const float2 t = *(const float2*)(sums_of + u * 4 + down_pair * 2);
    x0 = t.x * down_real;
    x1 = t.y * down_real;
  };
  const auto scale_of = [&](int u, int far, float& s, float& t) {
    const u8* const from = down_scales_at + (row + 8 * (far ^ int(odd))) * (WIDTH / 32) + u * 4;
    const u32 v = *(const u32*)from, w = *(const u32*)(from + WIDTH / 2);
    s = as_float(down_pair ? v & 0xffff0000u : v << 16);
    t = as_float(down_pair ? w & 0xffff0000u : w << 16);
  };
  float a = 0.f, b = 0.f;
  rows_as_they_lie<DOWN::W, DOWN_STEPS>(place + (odd ? DOWN_EIGHT + 64 : 0), place + (odd ? 0 : DOWN_EIGHT + 64), octet, sum_of, scale_of, a, b);
  total_a[0] = odd ? b : a;
  total_b[0] = odd ? a : b;
}
