// What stands in front of a kernel's text to compile it for a CPU: CUDA's words, and functions in
// place of those that are written in assembly.  hopper.cpp and what it includes have what they do.

#pragma once

#include <math.h>  // of C: those of C++ take three times as long as a kernel
#include <string.h>

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
struct TensorMap;

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace on_cpu {

struct Index {
  unsigned x;
};

struct Thread {
  Index thread, block, grid;
};

extern Thread* current;  // the one that runs

// A tensor that the kernel may read and write, and of which `after` has what the kernel in front
// writes there; null where it was there before.
struct Tensor {
  void* at;
  u64 bytes;
  const void* after;
};

struct Launch {
  int clusters, cluster, threads, shared_bytes;
  int blocks;     // that a multiprocessor holds
  int stages;     // how many barriers are called full; the others are called empty
  int dependent;  // whether the kernel in front may still run
  int late;       // whether copies arrive as late as they may, or at once
  u32 seed;       // of which threads run first; 0: all in turn
  int tensors;
  const Tensor* tensor;
  int outs;       // how many of them are results, which come first
  u64 conflicts;  // of banks, in loads and stores of matrices: set by the launch
};

// Run a kernel; returns what went wrong, or null.
const char* launch(Launch& how, bool bfloat16, void (*kernel)(void**), void** arguments);

float to_float(u16 bits);
float to_float(u16 bits, bool bfloat16);
u16 to_bits(float value);
unsigned char* shared_memory();
u32 address_of(const void* pointer);
void check_access(const void* pointer, u64 bytes);
void check_store(const void* pointer);
void sync_threads(int name, int threads);
void arrive_threads(int name, int threads);
void sync_warp();
void arrive(u32 barrier, int rank);
void start_copy(u32 to, const TensorMap& from, int k, int line, u32 barrier, u32 ranks);
int own_rank();
void change_registers(int count, bool more);
void matrices(int count, bool store, bool columns, u32 address, u32& first, u32& second);
void move_words(bool store, bool together, const u32 (&addresses)[2], u32 (&words)[2]);
void start_product(void* sums, const char* type, int count, const u32* registers, u64 tall, u64 wide, bool more,
                   bool turned);
void wait_for_products(int but);
void commit_products();

}  // namespace on_cpu

#define threadIdx (on_cpu::current->thread)
#define blockIdx (on_cpu::current->block)
#define gridDim (on_cpu::current->grid)

struct Four {
  u32 x, y, z, w;
};

// 16 bytes of memory, which moves check.
struct uint4 : Four {
  uint4(const uint4& other) : Four(other) { on_cpu::check_access(&other, 16); }
  uint4& operator=(const Four& values) {
    on_cpu::check_access(this, 16);
    memmove(this, &values, 16);
    return *this;
  }
  uint4& operator=(const uint4& other) {
    on_cpu::check_access(this, 16);
    on_cpu::check_access(&other, 16);
    on_cpu::check_store(this);
    memmove(this, &other, 16);
    return *this;
  }
};

inline Four make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
struct uint2 {
  u32 x, y;

  uint2(const uint2& other) : x(other.x), y(other.y) { on_cpu::check_access(&other, 8); }
};

inline int min(int a, int b) { return a < b ? a : b; }
inline constexpr int max(int a, int b) { return a < b ? b : a; }
inline void __syncthreads() { on_cpu::sync_threads(0, 0); }
inline void __syncwarp() { on_cpu::sync_warp(); }
inline u32 __cvta_generic_to_shared(const void* pointer) { return on_cpu::address_of(pointer); }

inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u32 chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 which = selector >> 4 * i & 7;
    chosen |= ((which < 4 ? low : high) >> which % 4 * 8 & 255) << 8 * i;
  }
  return chosen;
}

// Of maths.cu
inline float number(u16 bits) { return on_cpu::to_float(bits); }
inline u32 pack(float low, float high) {
  return on_cpu::to_bits(low) | (u32)on_cpu::to_bits(high) << 16;
}

// Of packed.cu
inline u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
  return pack(number(a) * number(b) + number(c),
              number(a >> 16) * number(b >> 16) + number(c >> 16));
}
template <bool HIGHER>
u32 multiply_by_half(u32 pair, u32 word) {
  const float by = number(HIGHER ? word >> 16 : word);
  return pack(number(pair) * by, number(pair >> 16) * by);
}

// Of hopper.cu
void barrier_init(u32 barrier, u32 arrivals);
void barrier_expect(u32 barrier, u32 bytes);
void barrier_wait(u32 barrier, u32 parity);
void barriers_ready();
void cluster_sync();
u32 load_from(u32 address, u32 rank);
void wait_for_predecessor();
void release_successor();
void products_begin();

inline void barrier_arrive_here(u32 barrier) { on_cpu::arrive(barrier, on_cpu::own_rank()); }
inline void barrier_arrive_there(u32 barrier, u32 rank) { on_cpu::arrive(barrier, rank); }
inline int forget(int number) { return number; }
inline int of_warp(int number) { return number; }
inline int cluster_rank() { return on_cpu::own_rank(); }
inline void copy(u32 to, const TensorMap& from, int k, int line, u32 barrier) {
  on_cpu::start_copy(to, from, k, line, barrier, 1u << on_cpu::own_rank());
}
inline void copy_to(u32 to, const TensorMap& from, int k, int line, u32 barrier, u16 ranks) {
  on_cpu::start_copy(to, from, k, line, barrier, ranks);
}
template <int THREADS>
void threads_sync(int name) {
  static_assert(THREADS % 32 == 0, "whole warps meet");
  on_cpu::sync_threads(name, THREADS);
}
template <int THREADS>
void threads_arrive(int name) {
  static_assert(THREADS % 32 == 0, "whole warps meet");
  on_cpu::arrive_threads(name, THREADS);
}
template <int COUNT>
void keep_registers() {
  static_assert(COUNT % 8 == 0 && 24 <= COUNT && COUNT <= 256, "setmaxnreg takes no such number");
  on_cpu::change_registers(COUNT, false);
}
template <int COUNT>
void take_registers() {
  static_assert(COUNT % 8 == 0 && 24 <= COUNT && COUNT <= 256, "setmaxnreg takes no such number");
  on_cpu::change_registers(COUNT, true);
}
template <bool COLUMNS>
void load_matrices(u32 address, u32& first, u32& second) {
  on_cpu::matrices(2, false, COLUMNS, address, first, second);
}
template <bool COLUMNS>
void store_matrices(u32 address, u32 first, u32 second) {
  on_cpu::matrices(2, true, COLUMNS, address, first, second);
}
inline void store_columns(u32 address, u32 word) {
  u32 none = 0;
  on_cpu::matrices(1, true, true, address, word, none);
}
template <bool TOGETHER>
void load_floats(u32 at, u32 next, float& first, float& second) {
  u32 words[2];
  on_cpu::move_words(false, TOGETHER, {at, next}, words);
  memcpy(&first, &words[0], 4);
  memcpy(&second, &words[1], 4);
}
template <bool TOGETHER>
void store_words(u32 at, u32 next, u32 first, u32 second) {
  u32 words[2] = {first, second};
  on_cpu::move_words(true, TOGETHER, {at, next}, words);
}
template <int LEFT>
void products_of_before() {
  on_cpu::commit_products();
  on_cpu::wait_for_products(LEFT);
}

// Written for each form
inline u64 descriptor_of(u32 low) { return (u64)PRODUCT_LAYOUT << 32 | low; }
template <class Sum, int COUNT>
void multiply(Sum (&sums)[COUNT], u32 tall, u32 wide, int more) {
  static_assert(2 * COUNT == PRODUCT_LINES, "wgmma has another number of sums");
  on_cpu::start_product(sums, PRODUCT_TYPE, COUNT, nullptr, descriptor_of(tall), descriptor_of(wide),
                        more != 0, PRODUCT_TURNED);
}
template <class Sum, int COUNT>
void multiply(Sum (&sums)[COUNT], const u32 (&tall)[4], u32 wide, int more) {
  static_assert(2 * COUNT == PRODUCT_LINES, "wgmma has another number of sums");
  on_cpu::start_product(sums, PRODUCT_TYPE, COUNT, tall, 0, descriptor_of(wide), more != 0, false);
}
template <class Sum, int COUNT>
void settle(Sum (&)[COUNT]) {
  on_cpu::wait_for_products(0);
}
