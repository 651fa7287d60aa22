// Sixteen rows of weights times one vector, by one warp, with the tensor cores' m16n8k16.
//
// Lane 4g+q reads chunk 4s+q of row g of tile A and of row g of tile B at step s: A and B are gate
// and up of the same eight rows, or two neighbouring eights. The vector comes in columns: column j
// holds, for quad lane j alone, the vector's upper half (bfloat16), column 4+j its rest (what is
// left after the upper half, again bfloat16). So each product of the tile belongs to one chunk, and
// one scale, and an activation in float32 keeps 16 bits. Sums are float32 from the first product.
//
// Operand: chunk c at x + c * PARTS * 64 bytes, upper half then rest, each in the formats' pair
// order; `sums`: four float32 a chunk, the sums of its octets.

template <int BYTES>
FN void load_words(const u8* p, u32* r) {
  if (BYTES == 24) {  // 8-byte alignment is all a chunk of six bits has
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint2 v = load8(p + 8 * i);
      r[2 * i] = v.x;
      r[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 v = BYTES == 16 ? stream16(p) : load16(p + 16 * i);
      r[4 * i] = v.x;
      r[4 * i + 1] = v.y;
      r[4 * i + 2] = v.z;
      r[4 * i + 3] = v.w;
    }
  }
}

constexpr int aligned_to(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
}

// The scales (or biases) of one row for U steps, packed in words as they lie in memory.
template <class P, int D, int U>
struct RowScales {
  static constexpr int EACH = P::SCALE == 0 ? 0 : P::SCALE <= 2 ? 2 : 1;
  static constexpr int COUNT = P::SCALE == 0 ? 0 : (U * 128 + P::GROUP - 1) / P::GROUP;
  static constexpr int BYTES = COUNT * EACH;
  static constexpr int WORDS = BYTES == 0 ? 1 : (BYTES + 3) / 4;
  static constexpr int ROW = P::SCALE == 0 ? 16 : D / P::GROUP * EACH;
  static constexpr int ALIGN = aligned_to(ROW) < aligned_to(BYTES) ? aligned_to(ROW) : aligned_to(BYTES);
  u32 v[WORDS];

  FN void load(const u8* row, int step, bool whole) {
    if (P::SCALE == 0) return;
    const int first = step * 128 / P::GROUP;
    if (whole && ALIGN >= 4) {
      const u8* p = row + first * EACH;
#pragma unroll
      for (int i = 0; i < WORDS;) {
        if (ALIGN == 16) {
          const uint4 t = load16(p + 4 * i);
          v[i] = t.x, v[i + 1] = t.y, v[i + 2] = t.z, v[i + 3] = t.w;
          i += 4;
        } else if (ALIGN == 8) {
          const uint2 t = load8(p + 4 * i);
          v[i] = t.x, v[i + 1] = t.y;
          i += 2;
        } else {
          v[i] = load4(p + 4 * i);
          i += 1;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) v[i] = 0u;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        u32 t = 0u;
        if (first + i < D / P::GROUP) t = EACH == 2 ? load2(row + (first + i) * 2) : load1(row + first + i);
        v[i * EACH / 4] |= t << (i * EACH % 4 * 8);
      }
    }
  }

  static FN float value(u32 bits) {
    if (P::SCALE == 1) return scale_bf16(bits & 0xffffu);
    if (P::SCALE == 2) return half_to_float(bits & 0xffffu);
    if (P::SCALE == 3) return scale_e8m0(bits & 0xffu);
    return scale_e4m3(bits & 0xffu);
  }

  // For step u of the batch and the pair of chunks (0,1) or (2,3): out[2j + h] is the scale of
  // half h (16 weights) of the pair's chunk j.
  FN void pick(int u, int pair, float (&out)[4]) const {
    if (P::SCALE == 0) {
      out[0] = out[1] = out[2] = out[3] = 1.f;
    } else if (P::GROUP == 16) {
      const u32 w = pair ? v[2 * u + 1] : v[2 * u];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = value(w >> (8 * i));
    } else if (P::GROUP == 32 && EACH == 2) {
      const u32 w = pair ? v[2 * u + 1] : v[2 * u];
      out[0] = out[1] = value(w);
      out[2] = out[3] = value(w >> 16);
    } else if (P::GROUP == 32) {
      const u32 w = v[u] >> (16 * pair);
      out[0] = out[1] = value(w);
      out[2] = out[3] = value(w >> 8);
    } else {
      const int at = P::GROUP == 64 ? u * 2 : u;
      const u32 w = v[at * EACH / 4] >> (at * EACH % 4 * 8);
      out[0] = out[1] = out[2] = out[3] = value(P::GROUP == 64 ? w >> (8 * EACH * pair) : w);
    }
  }
};

template <class P>
struct Row {  // one lane's row of one projection
  const u8 *w, *s, *b;
};

template <class P, int D>
FN Row<P> row_at(const void* w, const void* s, const void* b, u64 row) {
  constexpr u64 EACH = P::SCALE <= 2 ? 2 : 1;
  constexpr u64 SCALES = P::SCALE == 0 ? 0 : D / P::GROUP * EACH;
  Row<P> r;
  r.w = (const u8*)w + row * (u64(D) / 32 * P::W::WORDS * 4);
  r.s = (const u8*)s + row * SCALES;
  r.b = (const u8*)b + row * SCALES;
  return r;
}

// Steps begin to end of D, U at a time; a and b get this lane's share of rows A and B.
template <class A, class B, int D, int U, int PIECES>
FN void rows16(const Row<A> ra, const Row<B> rb, const u8* x, const float* sums, const u8* zeros,
               int begin, int end, float& a, float& b) {
  constexpr int CHUNKS = D / 32;
  constexpr bool EVEN = CHUNKS % 4 == 0;
  constexpr bool SUMS = A::BIAS || B::BIAS || A::W::OFFSET != 0.f || B::W::OFFSET != 0.f;
  const int lane = lane_id(), q = lane & 3, n = lane >> 2;
  const bool live = (n & 3) == q && n < 4 * PIECES, first = q < 2;
  const int pair = q & 1;
  // Lanes with nothing to give read zeros: no branch, no select.
  const u8* xp = live ? x + q * (64 * PIECES) + (n >> 2) * 64 : zeros;
  const int xstep = live ? 256 * PIECES : 0;
  const u8* sp = first ? (const u8*)(sums + 8 * pair) : zeros;
  const int sstep = first ? 64 : 0;

  for (int s0 = begin; s0 < end; s0 += U) {
    u32 wa[U][A::W::WORDS], wb[U][B::W::WORDS];
    RowScales<A, D, U> sa, ba;
    RowScales<B, D, U> sb, bb;
    const bool whole = s0 + U <= end && (EVEN || (s0 + U) * 4 <= CHUNKS);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int chunk = (s0 + u) * 4 + q;
      if (whole || (s0 + u < end && chunk < CHUNKS)) {
        load_words<A::W::WORDS * 4>(ra.w + chunk * (A::W::WORDS * 4), wa[u]);
        load_words<B::W::WORDS * 4>(rb.w + chunk * (B::W::WORDS * 4), wb[u]);
      } else {
#pragma unroll
        for (int i = 0; i < A::W::WORDS; ++i) wa[u][i] = 0u;
#pragma unroll
        for (int i = 0; i < B::W::WORDS; ++i) wb[u][i] = 0u;
      }
    }
    sa.load(ra.s, s0, whole);
    sb.load(rb.s, s0, whole);
    if (A::BIAS) ba.load(ra.b, s0, whole);
    if (B::BIAS) bb.load(rb.b, s0, whole);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!whole && s0 + u >= end) break;
      const int step = s0 + u;
      const bool here = EVEN || whole || step * 4 + q < CHUNKS;
      const bool has0 = EVEN || whole || step * 4 + 2 * pair < CHUNKS;
      const bool has1 = EVEN || whole || step * 4 + 2 * pair + 1 < CHUNKS;
      float x0 = 0.f, x1 = 0.f;
      if (SUMS) {
        const float4* p = (const float4*)(sp + step * sstep);
        if (has0) {
          const float4 t = p[0];
          x0 = (t.x + t.y) + (t.z + t.w);
        }
        if (has1) {
          const float4 t = p[first ? 1 : 0];
          x1 = (t.x + t.y) + (t.z + t.w);
        }
      }
      // The integers' offset is taken off before anything is added: what is left is exact.
      float c[4] = {-A::W::OFFSET * x0, -A::W::OFFSET * x1, -B::W::OFFSET * x0, -B::W::OFFSET * x1};
      float d[4] = {0.f, 0.f, 0.f, 0.f};
      const uint4* xv = (const uint4*)(xp + step * xstep);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 v = make_uint4(0u, 0u, 0u, 0u);
        if (here) v = xv[i];
        u32 pa[4], pb[4];
        A::W::octet(wa[u], i, pa);
        B::W::octet(wb[u], i, pb);
        if (i < 2) {
          mma(c, pa[0], pb[0], pa[1], pb[1], v.x, v.y);
          mma(c, pa[2], pb[2], pa[3], pb[3], v.z, v.w);
        } else {
          mma(d, pa[0], pb[0], pa[1], pb[1], v.x, v.y);
          mma(d, pa[2], pb[2], pa[3], pb[3], v.z, v.w);
        }
      }
      float t[4];
      sa.pick(u, pair, t);
      a += t[0] * c[0] + t[1] * d[0] + t[2] * c[1] + t[3] * d[1];
      sb.pick(u, pair, t);
      b += t[0] * c[2] + t[1] * d[2] + t[2] * c[3] + t[3] * d[3];
      if (A::BIAS) {
        ba.pick(u, pair, t);
        a += t[0] * x0 + t[2] * x1;
      }
      if (B::BIAS) {
        bb.pick(u, pair, t);
        b += t[0] * x0 + t[2] * x1;
      }
    }
  }
}
