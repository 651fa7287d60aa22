// Sixteen rows of weights times one vector, by one warp, with the tensor cores' m16n8k16.
//
// Eight rows of tile A and eight of tile B (gate and up of the same rows, or two neighbouring
// eights). Their weights stream through a ring of stages in shared memory, U steps of 128 columns a
// stage, asynchronously, in pieces that are contiguous in memory; the ring runs on from tile to
// tile. At a step, lane 4g+q takes chunk q (32 weights) of row g of A and of B.
//
// The vector comes in columns: column j holds, for quad lane j alone, the vector's upper half
// (bfloat16), column 4+j its rest (what is left after the upper half, again bfloat16). So each
// product of the tile belongs to one chunk, and one scale, and an activation in float32 keeps 16
// bits. Sums are float32 from the first product on.
//
// Operand: of a step, octet i of chunk q at ((i * 4 + q) * PIECES) * 16 bytes, upper half then rest,
// in the formats' pair order: what the lanes of a quad row read at once lies side by side.

constexpr int aligned_to(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
}
constexpr int UNROLLED = UNROLL;  // steps of a stage; a macro is not taken where it is used
constexpr int least(int a, int b) { return a < b ? a : b; }
// Two-byte elements of what the caller hands over, which may be a view and begin at any of them.
FN uint4 load16_of_any(const void* p) {
  if ((u64(p) & 15u) == 0) return load16(p);
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = load2((const u8*)p + 4 * i) | load2((const u8*)p + 4 * i + 2) << 16;
  return make_uint4(w[0], w[1], w[2], w[3]);
}
// A row's stride in a stage, such that a warp's reads meet in no bank: of chunks of 16 bytes, odd
// rows have the halves of each 128 bytes exchanged, unless the stride does it.
constexpr int strided(int bytes, int chunk) { return chunk == 16 ? bytes : (bytes + 127) / 128 * 128 + 16; }

// Eight rows of one projection, U steps of each: how they lie in a stage. Warps that share a row begin
// multiples of APART steps into it, so that a piece of scales is no wider than that is aligned.
template <class P, int D, int U, int APART = 0>
struct Panel {
  static constexpr int CHUNK = P::W::WORDS * 4;
  static constexpr int WIDE = U * 4 * CHUNK;
  static constexpr int ROW = D / 32 * CHUNK;
  static constexpr int PIECE = ROW % 16 == 0 && WIDE % 16 == 0 ? 16 : 8;
  static constexpr int STRIDE = strided(WIDE, CHUNK);
  static constexpr bool CROSSED = CHUNK == 16 && WIDE % 128 == 0;
  static constexpr int EACH = P::SCALE == 0 ? 1 : P::SCALE <= 2 ? 2 : 1;
  static constexpr int COUNT = P::SCALE == 0 ? 0 : (U * 128 + P::GROUP - 1) / P::GROUP;
  static constexpr int SCALES = COUNT * EACH;
  static constexpr int SCALE_ROW = P::SCALE == 0 ? 16 : D / P::GROUP * EACH;
  static constexpr int SCALE_PIECE =
      SCALES == 0 ? 16
                  : least(least(aligned_to(SCALE_ROW), aligned_to(SCALES)), aligned_to(APART * 128 / P::GROUP * EACH));
  // Rows of scales at odd multiples of two bytes, too little for a copy: the pieces of 16 bytes that
  // cover them are copied, so that a row's begin LATE bytes into its place. Eight rows begin at a
  // multiple of 16. Past a row's end, where weights and vector are zeros, stand the next row's.
  static constexpr bool COVERED = SCALES > 0 && SCALE_ROW % 4 == 2 && P::GROUP >= 32 * EACH;
  static constexpr int SCALE_STRIDE = (SCALES + (COVERED ? 14 : 0) + 15) / 16 * 16;
  static constexpr int SCALE_PIECES = COVERED ? SCALE_STRIDE / 16 : SCALES / SCALE_PIECE;
  static constexpr int AT_SCALES = 8 * STRIDE;
  static constexpr int AT_BIASES = AT_SCALES + 8 * SCALE_STRIDE;
  static constexpr int SIZE = AT_BIASES + (P::BIAS ? 8 * SCALE_STRIDE : 0);

  static FN int late(int row, int step) {
    return COVERED ? (row * SCALE_ROW + step * 128 / P::GROUP * EACH) & 15 : 0;
  }
  static FN int crossed(int row, int byte) { return CROSSED ? byte ^ (row & 1) << 6 : byte; }

  // The weights of eight rows, columns from `step` on; those past `end` become zeros. EVEN: none is.
  template <bool EVEN>
  static FN void fetch(u8* to, const u8* w, int step, int end, int lane) {
    constexpr int PER = WIDE / PIECE;
    // Whole rows at once, where that leaves few lanes idle: then one address serves all copies.
    constexpr int ROWS = 32 % PER == 0 || PER == 12 ? 32 / PER : 0, APIECE = ROWS ? ROWS : 1;
    static_assert(!CROSSED || APIECE % 2 == 0, "copies of one lane go to rows of one kind");
    const int first = step * 4 * CHUNK, limit = min(end * 4 * CHUNK, int(ROW));
    if (ROWS) {
      const int row = lane / PER, byte = lane % PER * PIECE;
      const bool here = EVEN || first + byte < limit;
      const u8* const p = w + row * ROW + first + byte;
      u8* const q = to + row * STRIDE + crossed(row, byte);
      if (32 % PER == 0 || row < APIECE) {
#pragma unroll
        for (int i = 0; i < 8 / APIECE; ++i) {
          if (PIECE == 16) copy16(q + i * (APIECE * STRIDE), p + i * (APIECE * ROW), here);
          else copy8(q + i * (APIECE * STRIDE), p + i * (APIECE * ROW), here);
        }
      }
      return;
    }
    constexpr int ALL = 8 * PER;
#pragma unroll
    for (int i = 0; i < (ALL + 31) / 32; ++i) {
      const int at = i * 32 + lane;
      if (ALL % 32 == 0 || at < ALL) {
        const int row = at / PER, byte = at % PER * PIECE;
        const u8* p = w + row * ROW + first + byte;
        u8* q = to + row * STRIDE + crossed(row, byte);
        if (PIECE == 16) copy16(q, p, EVEN || first + byte < limit);
        else copy8(q, p, EVEN || first + byte < limit);
      }
    }
  }

  // One piece of a row's scales (or biases): `to` and `from` are those of the first row.
  template <bool EVEN>
  static FN void fetch_piece(u8* to, const u8* from, int row, int step, int piece) {
    const int place = step * 128 / P::GROUP * EACH;
    to += row * SCALE_STRIDE;
    from += row * SCALE_ROW;
    if (COVERED) {
      const int skip = late(row, step), end = EVEN ? int(SCALES) : min(int(SCALES), SCALE_ROW - place);
      copy16(to + piece * 16, from + place - skip + piece * 16, piece * 16 < skip + end);
      return;
    }
    const int byte = piece * SCALE_PIECE;
    const bool here = EVEN || place + byte < SCALE_ROW;
    to += byte;
    from += place + byte;
    if (SCALE_PIECE == 16) copy16(to, from, here);
    else if (SCALE_PIECE == 8) copy8(to, from, here);
    else if (SCALE_PIECE == 4) copy4(to, from, here);
    else if (SCALE_PIECE == 2) *(u16*)to = u16(here ? load2(from) : 0u);
    else *to = u8(here ? load1(from) : 0u);
  }
  template <bool EVEN>
  static FN void fetch_scales(u8* to, const u8* from, int step, int lane) {
    constexpr int PER = SCALES == 0 ? 1 : SCALE_PIECES;
#pragma unroll
    for (int i = 0; i < (SCALES == 0 ? 0 : (8 * PER + 31) / 32); ++i) {
      const int at = i * 32 + lane;
      if (at < 8 * PER) fetch_piece<EVEN>(to, from, at / PER, step, at % PER);
    }
  }

  static FN void words(const u8* stage, int row, int chunk, u32 (&r)[P::W::WORDS]) {
    const u8* p = stage + row * STRIDE + crossed(row, chunk * CHUNK);
    if (CHUNK % 16 == 0) {
#pragma unroll
      for (int i = 0; i < CHUNK / 16; ++i) {
        const uint4 v = ((const uint4*)p)[i];
        r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < CHUNK / 8; ++i) {
        const uint2 v = ((const uint2*)p)[i];
        r[2 * i] = v.x, r[2 * i + 1] = v.y;
      }
    }
  }

  static FN float value(u32 bits) {
    if (P::SCALE == 1) return scale_bf16(bits);
    if (P::SCALE == 2) return half_to_float(bits & 0xffffu);
    if (P::SCALE == 3) return scale_e8m0(bits << 23);
    return scale_e4m3(bits & 0xffu);
  }

  // Which of a stage's steps a lane copies of: weights, and scales. One for all its copies (JOINT).
  static FN int step_of_weights(int lane) { return lane % (WIDE / PIECE) * PIECE / (4 * CHUNK); }
  static FN int step_of_scales(int lane) {
    return SCALES == 0 ? 0 : lane % SCALE_PIECES * SCALE_PIECE * P::GROUP / (128 * EACH);
  }
  static constexpr bool JOINT = 32 % (WIDE / PIECE) == 0 && (SCALES == 0 || (!COVERED && 32 % SCALE_PIECES == 0));

  // Scales (at AT_SCALES) or biases of step u (the stage begins at `step`) and the pair of chunks (0,1) or (2,3) of one row:
  // out[2j + h] is that of half h (16 weights) of the pair's chunk j.
  static FN void scales(const u8* from, int row, int step, int u, int pair, float (&out)[4]) {
    const u8* p = from + row * SCALE_STRIDE + late(row, step);
    if (P::SCALE == 0) {
      out[0] = out[1] = out[2] = out[3] = 1.f;
    } else if (P::GROUP == 16) {
      const u32 w = *(const u32*)(p + u * 8 + pair * 4);
      if (P::SCALE == 4) {
        four_e4m3(w, out);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = value(w >> (8 * i));
      }
    } else if (P::GROUP == 32 && P::SCALE == 3) {
      const u32 w = *(const u16*)(p + u * 4 + pair * 2);
      out[0] = out[1] = scale_e8m0(w << 23);
      out[2] = out[3] = scale_e8m0(w << 15);
    } else if (P::GROUP == 32) {
      const u32 w = EACH == 2 ? *(const u32*)(p + u * 8 + pair * 4) : *(const u16*)(p + u * 4 + pair * 2);
      out[0] = out[1] = value(w);
      out[2] = out[3] = value(w >> (8 * EACH));
    } else {
      const int at = P::GROUP == 64 ? u * 2 + pair : u * 128 / P::GROUP;
      const u32 w = EACH == 2 ? *(const u16*)(p + at * 2) : p[at];
      out[0] = out[1] = out[2] = out[3] = value(w);
    }
  }
};

// What a row's sum is multiplied by in the end, the operand having been multiplied by `lift`.
template <class P>
FN constexpr float undo(float lift) { return P::W::UNDO / lift; }

struct Rows {  // where the eight rows of a panel begin: weights, scales, biases
  const u8 *w, *s, *b;
};
#define ROWS_OF(PANEL, name, row)                                                     \
  Rows {                                                                              \
    (const u8*)name##_w + (row) * PANEL::ROW, (const u8*)name##_s + (row) * PANEL::SCALE_ROW, \
        (const u8*)name##_b + (row) * PANEL::SCALE_ROW                                \
  }

// One stage: A's and B's panels. Where its parts lie does not depend on APART.
template <class A, class B, int D, int U, int APART = 0>
struct Stage {
  typedef Panel<A, D, U, APART> PA;
  typedef Panel<B, D, U, APART> PB;
  static constexpr int AT_B = PA::SIZE;
  static constexpr int SIZE = (AT_B + PB::SIZE + 127) / 128 * 128;
  // Where both have scales and biases of one layout, a lane's piece may be of any of the four.
  static constexpr bool ALIKE = A::BIAS && B::BIAS && PA::SCALE_ROW == PB::SCALE_ROW &&
                                PA::SCALES == PB::SCALES && PA::SIZE == PB::SIZE;

  template <bool EVEN>
  static FN void fetch(u8* to, const Rows a, const Rows b, int step, int end, int lane) {
    fetch_weights<EVEN>(to, a, b, step, end, lane);
    fetch_scales<EVEN>(to, a, b, step, lane);
  }
  template <bool EVEN>
  static FN void fetch_weights(u8* to, const Rows a, const Rows b, int step, int end, int lane) {
    PA::template fetch<EVEN>(to, a.w, step, end, lane);
    PB::template fetch<EVEN>(to + AT_B, b.w, step, end, lane);
  }
  template <bool EVEN>
  static FN void fetch_scales(u8* to, const Rows a, const Rows b, int step, int lane) {
    if (ALIKE) {
      constexpr int PER = PA::SCALES == 0 ? 1 : PA::SCALE_PIECES;
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const int at = i * 32 + lane, row = at / PER & 7, kind = at / (8 * PER);
        const u8* from = kind & 2 ? kind & 1 ? b.b : b.s : kind & 1 ? a.b : a.s;
        u8* place = to + (kind & 2 ? AT_B : 0) + (kind & 1 ? PA::AT_BIASES : PA::AT_SCALES);
        PA::template fetch_piece<EVEN>(place, from, row, step, at % PER);
      }
    } else {
      PA::template fetch_scales<EVEN>(to + PA::AT_SCALES, a.s, step, lane);
      PB::template fetch_scales<EVEN>(to + AT_B + PB::AT_SCALES, b.s, step, lane);
      if (A::BIAS) PA::template fetch_scales<EVEN>(to + PA::AT_BIASES, a.b, step, lane);
      if (B::BIAS) PB::template fetch_scales<EVEN>(to + AT_B + PB::AT_BIASES, b.b, step, lane);
    }
  }
};

// Scales on what one lane has of one row: c and d are the chunks' first and second halves.
template <class P, class Q>
FN void part(const u8* panel, int g, int step, int u, int pair, float c0, float c1, float d0, float d1, float x0,
             float x1, float& to) {
  float s[4], t[4];
  Q::scales(panel + Q::AT_SCALES, g, step, u, pair, s);
  if (P::GROUP == 16) to += (s[0] * c0 + s[1] * d0) + (s[2] * c1 + s[3] * d1);
  else if (P::GROUP == 32) to += s[0] * (c0 + d0) + s[2] * (c1 + d1);
  else to += s[0] * ((c0 + d0) + (c1 + d1));
  if (P::BIAS) {  // the integers' offset goes with the bias
    Q::scales(panel + Q::AT_BIASES, g, step, u, pair, t);
    if (P::GROUP == 32) to += (t[0] - P::W::OFFSET * s[0]) * x0 + (t[2] - P::W::OFFSET * s[2]) * x1;
    else to += (t[0] - P::W::OFFSET * s[0]) * (x0 + x1);
  }
}

// Whether this lane has something to give to the operand, and where that begins in a step's.
template <int PIECES>
FN bool gives(int lane) {
  return (lane >> 2 & 3) == (lane & 3) && lane >> 2 < 4 * PIECES;
}
template <int PIECES>
FN int gives_at(int lane) {
  return ((lane & 3) * PIECES + (lane >> 4)) * 16;
}

#define TAKE(A, B, D, U) [&](int u, u32(&pa)[4][4], u32(&pb)[4][4]) { unpack<Stage<A, B, D, U>, A, B>(stage, u, pa, pb); }
// A step's weights of a lane, unpacked: rows of A and of B, each chunk's four octets.
template <class S, class A, class B>
FN void unpack(const u8* stage, int u, u32 (&pa)[4][4], u32 (&pb)[4][4]) {
  const int lane = lane_id(), q = lane & 3, g = lane >> 2;
  u32 wa[A::W::WORDS], wb[B::W::WORDS];
  S::PA::words(stage, g, u * 4 + q, wa);
  S::PB::words(stage + S::AT_B, g, u * 4 + q, wb);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    A::W::octet(wa, i, pa[i]);
    B::W::octet(wb, i, pb[i]);
  }
}

// U steps of a stage that begins at `step`: `count` of them are real; before(u) comes before each.
// take(u, pa, pb): their weights, unpacked. octet(u, i): this lane's piece of the operand, zeros
// where it gives nothing; sum_of(u, x0, x1): the sums of this lane's two chunks of step u.
template <class A, class B, int D, int U, class Before, class Take, class OctetOf, class SumOf>
FN void rows16(const u8* stage, int step, int count, Before before, Take take, OctetOf octet, SumOf sum_of, float& a,
               float& b) {
  typedef Stage<A, B, D, U> S;
  typedef typename S::PA PA;
  typedef typename S::PB PB;
  constexpr bool SUMS = A::BIAS || B::BIAS;
  const int lane = lane_id(), q = lane & 3, g = lane >> 2, pair = q & 1;
#pragma unroll UNROLLED
  for (int u = 0; u < U; ++u) {
    if (u < count) {
      before(u);
      u32 pa[4][4], pb[4][4];
      take(u, pa, pb);
      float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = octet(u, i);
        if (i < 2) {  // two chains: half the latency, and nvfp4's halves apart
          mma(c, pa[i][0], pb[i][0], pa[i][1], pb[i][1], v.x, v.y);
          mma(c, pa[i][2], pb[i][2], pa[i][3], pb[i][3], v.z, v.w);
        } else {
          mma(d, pa[i][0], pb[i][0], pa[i][1], pb[i][1], v.x, v.y);
          mma(d, pa[i][2], pb[i][2], pa[i][3], pb[i][3], v.z, v.w);
        }
      }
      float x0 = 0.f, x1 = 0.f;
      if (SUMS) sum_of(u, x0, x1);
      part<A, PA>(stage, g, step, u, pair, c[0], c[1], d[0], d[1], x0, x1, a);
      part<B, PB>(stage + S::AT_B, g, step, u, pair, c[2], c[3], d[2], d[3], x0, x1, b);
    }
  }
}

// The same in whole numbers, of 4-bit weights in groups of 64 or more, with m16n8k32: weights stay bytes, which
// takes less than half the instructions. Activations of a group of 64 are multiples of a power of two,
// 23 bits with their sign, in three signed bytes: columns 4j, 4j + 1 and 4j + 2 hold them for group j of
// a step, the highest first. Sums are whole numbers over a group. given(u, h): this lane's bytes of its
// chunk's words 2h and 2h + 1, of each the even weights', then the odd ones'; sum_of(u, sum, unit): the
// group's sum of activations, for one lane of two, and what they are multiples of.
FN int whole_at(int lane) {
  const int q = lane & 3, p = lane >> 2 & 3;
  return p * 128 + (q * 32 ^ (p & 1) * 64);
}
FN bool whole_gives(int lane) { return (lane >> 2 & 3) < 3 && lane >> 4 == (lane & 3) >> 1; }
template <class P, class Q>
FN void whole_part(const u8* panel, int g, int step, int u, int group, float high, float low, float unit, float sum,
                   float& to) {
  float s[4], t[4];
  Q::scales(panel + Q::AT_SCALES, g, step, u, group, s);
  Q::scales(panel + Q::AT_BIASES, g, step, u, group, t);
  to += s[0] * (high * unit + low * (unit * 0.00390625f)) + t[0] * sum;
}
template <class A, class B, int D, int U, class GivenOf, class SumOf>
FN void whole16(const u8* stage, int step, int count, GivenOf given, SumOf sum_of, float& a, float& b) {
  typedef Stage<A, B, D, U> S;
  const int lane = lane_id(), q = lane & 3, g = lane >> 2, group = q >> 1;
  constexpr u32 NIBBLES = 0x0f0f0f0fu;
#pragma unroll UNROLLED
  for (int u = 0; u < U; ++u) {
    if (u < count) {
      u32 wa[A::W::WORDS], wb[B::W::WORDS];
      S::PA::words(stage, g, u * 4 + q, wa);
      S::PB::words(stage + S::AT_B, g, u * 4 + q, wb);
      int c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 v = given(u, h);
        mma(c, wa[2 * h] & NIBBLES, wb[2 * h] & NIBBLES, wa[2 * h] >> 4 & NIBBLES, wb[2 * h] >> 4 & NIBBLES, v.x, v.y);
        mma(c, wa[2 * h + 1] & NIBBLES, wb[2 * h + 1] & NIBBLES, wa[2 * h + 1] >> 4 & NIBBLES,
            wb[2 * h + 1] >> 4 & NIBBLES, v.z, v.w);
      }
      float sum, unit;
      sum_of(u, sum, unit);
      whole_part<A, typename S::PA>(stage, g, step, u, group, float(c[0]), float(c[1]), unit, sum, a);
      whole_part<B, typename S::PB>(stage + S::AT_B, g, step, u, group, float(c[2]), float(c[3]), unit, sum, b);
    }
  }
}
// Eight activations as such multiples, and as bytes: most: the greatest of their group. If that is infinite the unit
// is no number; what is no number reaches the result by the group's sum.
FN float whole_unit(float most) {
  const u32 e = as_bits(most) >> 23;
  return e == 255u ? as_float(0x7fc00000u) : as_float((max(e, 23u) - 21u) << 23);
}
FN void whole_bytes(const float (&f)[8], float unit, uint2 (&to)[3]) {
  const float times = as_float((254u << 23) - as_bits(unit));  // 1 / unit
  u32 z[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)  // rounded where a float's last place is 1; bytes as signed digits
    z[i] = (as_bits(f[i] * times + 12582912.f) - (0x4b400000u - 0x8080u)) ^ 0x8080u;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const u32 low = permute(z[odd], z[odd + 2], 0x5140), low2 = permute(z[odd + 4], z[odd + 6], 0x5140);
    const u32 top = permute(z[odd], z[odd + 2], 0x0062), top2 = permute(z[odd + 4], z[odd + 6], 0x0062);
    u32 digit[3] = {permute(top, top2, 0x5410), permute(low, low2, 0x7632), permute(low, low2, 0x5410)};
#pragma unroll
    for (int p = 0; p < 3; ++p) (odd ? to[p].y : to[p].x) = digit[p];
  }
}
