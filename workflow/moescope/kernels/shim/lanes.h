// Threads of a thread block as fibers of one CPU thread: enough to run the kernels' text as it is,
// with its barriers and its exchanges between lanes. Slow, exact about who waits for whom; it
// says nothing about memory order between threads or about speed. Blocks that wait for each other
// are CPU threads, and what a block shares is each CPU thread's own.
#pragma once
// Plain C headers: the standard library's would take longer to compile than all the rest (libstdc++'s
// wrappers of these pull it in, unless told not to).
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
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

// A device faults at what lies askew, so the shim does: at every access by its type (the compiler's
// alignment checks, which call the function at the end of this file), and at every copy by its size.
inline void aligned(const void* p, int bytes, const char* what, const char* file, int line) {
  if ((uintptr_t)p % bytes == 0) return;
  fprintf(stderr, "%s:%d: %s of %d bytes at a misaligned address, %d past a multiple\n", file, line, what,
          bytes, int((uintptr_t)p % bytes));
  abort();
}

struct Fiber {
  ucontext_t context;
  jmp_buf at;
  bool begun;
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
  jmp_buf home;
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
inline void copy(void* to, const void* from, int bytes, bool here, const char* file, int line) {
  aligned(to, bytes, "a copy to shared memory", file, line);
  aligned(from, bytes, "a copy from global memory", file, line);
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
  if (!_setjmp(block.now->at)) _longjmp(block.home, 1);
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

inline void arrive(Meeting& m, int count) {  // and wait for nobody
  if (++m.arrived == count) {
    m.arrived = 0;
    ++m.generation;
  }
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
  _longjmp(block.home, 1);
}
// On with a fiber until it yields. Jumps, not contexts: those call the system at each switch.
inline void resume(Fiber& f) {
  block.now = &f;
  if (_setjmp(block.home)) return;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  setcontext(&f.context);
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
    f.done = f.begun = false;
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
    if (block.schedule && threads > WARP && pass % 48 == 0) held = int(dice >> 16) % (threads / WARP);
    for (int i = 0; i < threads; ++i) {
      Fiber& f = block.fibers[(first + i) % threads];
      if (f.done) continue;
      dice = dice * 1664525u + 1013904223u;
      if (block.schedule && (dice >> 30 == 0 || f.thread / WARP == held)) {  // stays behind
        left = 1;
        continue;
      }
      resume(f);
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

// What the compiler's alignment checks call (-fsanitize=alignment), in place of its own library.
struct Misaligned {
  const char* file;
  uint32_t line, column;
  const struct { uint16_t kind, info; char name[1]; }* type;
  unsigned char log_alignment, kind;
};
extern "C" __attribute__((used, visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(
    Misaligned* at, uintptr_t address) {
  char what[200];
  snprintf(what, sizeof what, "an access as %s,", at->type->name);
  lanes::aligned((const void*)address, 1 << at->log_alignment, what, at->file, at->line);
  abort();
}
