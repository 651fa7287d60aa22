// Threads of a thread block as fibers of one CPU thread: enough to run the kernels' text as it is,
// with its barriers and its exchanges between lanes. Slow, exact about who waits for whom; it
// says nothing about memory order between threads or about speed. Blocks that wait for each other
// are CPU threads, and what a block shares is each CPU thread's own.
#pragma once
// Plain C headers: the standard library's would take longer to compile than all the rest.
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace lanes {

constexpr int WARP = 32, MOST = 1024;

struct Meeting {  // `count` threads wait here for each other, again and again
  int arrived = 0;
  unsigned generation = 0;
};

struct Exchange {  // what the lanes of a warp show each other; two sheets, used in turn
  uint32_t sheet[2][WARP][16];
  Meeting meeting;
};

struct Copy {  // asked for, perhaps not yet done
  void* to;
  const void* from;
  int bytes, group;
  bool here;
};

struct Fiber {
  ucontext_t context;
  Copy* copies;
  int asked, done_copies, group;
  char* stack;
  int thread;
  unsigned turn;
  bool done;
};

struct Block {
  int threads, index, blocks;
  Fiber fibers[MOST];
  Exchange warps[MOST / WARP];
  Meeting all, named[16];
  ucontext_t home;
  Fiber* now;
  void (*body)();
  long switches;
  bool late;          // copies happen when they are waited for, not when they are asked for
  unsigned schedule;  // 0: threads in turn; else the seed of a random order
};

inline thread_local Block block;
constexpr int COPIES = 1 << 14;

inline void perform(const Copy& c) {
  if (c.here) memcpy(c.to, c.from, c.bytes);
  else memset(c.to, 0, c.bytes);
}
inline void copy(void* to, const void* from, int bytes, bool here) {
  if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) {
    fprintf(stderr, "a copy of %d bytes at a misaligned address\n", bytes);
    abort();
  }
  Fiber& f = *block.now;
  const Copy c = {to, from, bytes, f.group, here};
  if (!block.late) return perform(c);
  if (!f.copies) f.copies = (Copy*)malloc(COPIES * sizeof(Copy));
  if (f.asked - f.done_copies == COPIES) abort();
  f.copies[f.asked++ % COPIES] = c;
}
inline void commit_copies() { ++block.now->group; }
inline void wait_copies(int left) {
  Fiber& f = *block.now;
  while (f.done_copies < f.asked && f.copies[f.done_copies % COPIES].group < f.group - left)
    perform(f.copies[f.done_copies++ % COPIES]);
}

// Blocks of one launch: what all see.
inline uint64_t ticket(const void* p) { return __atomic_fetch_add((uint64_t*)p, 1, __ATOMIC_RELAXED); }
inline void hand_over(void* p, uint32_t v) {
  __atomic_store_n((uint32_t*)p, v == 0xffffffffu ? v - 1 : v, __ATOMIC_RELAXED);
}
inline uint32_t handed(const void* p) { return __atomic_load_n((const uint32_t*)p, __ATOMIC_RELAXED); }
inline void patience(unsigned turn) {
  if (turn > 20000000u) abort();
  sched_yield();
}

inline void yield() {
  if (++block.switches > 2000000000L) abort();
  swapcontext(&block.now->context, &block.home);
}

inline void meet(Meeting& m, int count) {
  const unsigned before = m.generation;
  if (++m.arrived == count) {
    m.arrived = 0;
    ++m.generation;
    return;
  }
  while (m.generation == before) yield();
}

inline int thread() { return block.now->thread; }
inline int lane() { return thread() % WARP; }

// Every lane of the warp gives `words` words; the answer holds all lanes' words.
inline const uint32_t (*show(const uint32_t* given, int words))[16] {
  Exchange& e = block.warps[thread() / WARP];
  const unsigned turn = block.now->turn++ & 1;
  memcpy(e.sheet[turn][lane()], given, 4 * words);
  meet(e.meeting, WARP);
  return e.sheet[turn];
}

inline void enter() {
  block.body();
  block.now->done = true;
  swapcontext(&block.now->context, &block.home);
}

inline void run_block(int index, int blocks, int threads, void (*body)()) {
  if (threads % WARP || threads > MOST) abort();
  block.threads = threads;
  block.index = index;
  block.blocks = blocks;
  block.body = body;
  for (auto& warp : block.warps) warp.meeting = Meeting{};
  block.all = Meeting{};
  for (auto& m : block.named) m = Meeting{};
  constexpr size_t STACK = 1 << 16;
  for (int t = 0; t < threads; ++t) {
    Fiber& f = block.fibers[t];
    if (!f.stack) f.stack = (char*)malloc(STACK);
    f.thread = t;
    f.turn = 0;
    f.done = false;
    f.asked = f.done_copies = f.group = 0;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  unsigned dice = block.schedule + index;
  int held = -1;  // one warp stands still for a while
  for (long pass = 0, left = 1; left; ++pass) {
    left = 0;
    dice = dice * 1664525u + 1013904223u;
    const int first = block.schedule ? int(dice >> 8) % threads : 0;
    if (block.schedule && pass % 48 == 0) held = int(dice >> 16) % (threads / WARP);
    for (int i = 0; i < threads; ++i) {
      Fiber& f = block.fibers[(first + i) % threads];
      if (f.done) continue;
      dice = dice * 1664525u + 1013904223u;
      if (block.schedule && (dice >> 30 == 0 || f.thread / WARP == held)) {  // stays behind
        left = 1;
        continue;
      }
      block.now = &f;
      swapcontext(&block.home, &f.context);
      left |= !f.done;
    }
  }
}

struct Start {
  int index, blocks, threads;
  bool late;
  unsigned schedule;
  void (*body)();
};
inline void* run_start(void* given) {
  const Start& s = *(const Start*)given;
  block.late = s.late;
  block.schedule = s.schedule;
  run_block(s.index, s.blocks, s.threads, s.body);
  for (auto& f : block.fibers) {
    free(f.stack);
    free(f.copies);
  }
  return nullptr;
}
// All blocks, one after the other or at once.
inline void run_blocks(int blocks, int threads, bool late, unsigned schedule, bool together, void (*body)()) {
  static Start starts[64];
  static pthread_t handles[64];
  if (together && blocks > 64) abort();
  for (int b = 0; b < blocks; ++b) {
    Start& s = starts[together ? b : 0] = {b, blocks, threads, late, schedule, body};
    if (pthread_create(&handles[together ? b : 0], nullptr, run_start, &s)) abort();
    if (!together) pthread_join(handles[0], nullptr);
  }
  for (int b = 0; together && b < blocks; ++b) pthread_join(handles[b], nullptr);
}

inline float bits_float(uint32_t v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline uint32_t float_bits(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
inline uint32_t to_bf16(float v) {
  const uint32_t b = float_bits(v);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
inline float from_half(uint32_t h) {
  _Float16 v;
  const uint16_t b = (uint16_t)h;
  memcpy(&v, &b, 2);
  return (float)v;
}
inline uint32_t to_half(float f) {
  const _Float16 v = (_Float16)f;
  uint16_t b;
  memcpy(&b, &v, 2);
  return b;
}

template <class T>
inline T shuffle(T v, int from) {
  uint32_t w[1];
  memcpy(w, &v, 4);
  const auto all = show(w, 1);
  T r;
  memcpy(&r, &all[from & (WARP - 1)][0], 4);
  return r;
}
template <class T, class F>
inline T fold(T v, F f) {  // butterflies from 16 down, so that every lane has the same answer
  for (int d = 16; d; d >>= 1) v = f(v, shuffle(v, lane() ^ d));
  return v;
}

}  // namespace lanes
