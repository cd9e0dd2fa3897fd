// The state of a launch, and how a thread waits.

#pragma once

#define PRODUCT_LINES 0
#define PRODUCT_TURNED 0
#define PRODUCT_TYPE "f16"
#define PRODUCT_LAYOUT 0
#include "hopper.h"

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace on_cpu {

Thread* current;

namespace {

constexpr u32 FIRST_ADDRESS = 1024;  // of a block's shared memory: the system has what is in front
constexpr u64 STACK_BYTES = 128 << 10;
constexpr int REGISTERS = 65536;     // of a multiprocessor
constexpr u16 UNWRITTEN = 0xFEED;    // a NaN that no conversion makes

struct Product {
  void* sums;        // float, or int of integers
  const char* type;  // of its operands, as PTX has it
  int count;
  const u32* registers;  // of this thread, for the tall operand; null where memory has it
  u64 tall, wide;
  bool more, turned;  // `turned`: 64 tall lines lie side by side, for each element of k
};

struct Fiber : Thread {
  ucontext_t context;
  int rank, warp, lane;
  bool done = false, fenced = false, for_predecessor = false;
  std::function<bool()> ready;
  std::function<std::string()> what;
  std::vector<Product> begun;                // not committed yet
  std::vector<std::vector<Product>> groups;  // committed
};

struct Barrier {
  int arrivals, missing;
  long long bytes = 0;  // expected and not yet arrived
  u32 phase = 0;
  bool known = false;  // to other blocks and to copies
};

struct Meeting {
  int arrived = 0, threads = 0;
  u32 times = 0;
};

struct Lane {
  u32 address, value[2], next;
};

struct Warp {
  Lane lanes[32];
  const char* what = nullptr;
  Meeting meeting;
};

struct Block {
  unsigned char* memory;
  std::map<u32, Barrier> barriers;
  Meeting meetings[16];
  std::vector<Warp> warps;
  std::vector<u64> computed;  // groups of products, by warp group
  int free_registers = 0, running;
};

struct Copy {
  std::vector<unsigned char> bytes;
  u32 to, barrier, ranks, width;  // of the swizzle, in bytes
};

struct Map {  // what Python has written to a TensorMap
  const unsigned char* data;
  u64 k, lines, box_k, box_lines, stride;  // `k` elements of a line, `stride` from line to line
  u64 element_bytes, rounds;               // whether a copy rounds float32 to tf32
};

struct Machine {
  Launch& how;
  bool bfloat16;
  void (*kernel)(void**);
  void** arguments;
  std::mt19937 random;
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  std::vector<Copy> copies;  // under way
  Meeting cluster;
  bool predecessor_ended;
  u64 events = 0;  // after which threads may go on that could not
  std::string failure;
  ucontext_t scheduler;
};

Machine* machine;

Fiber& self() { return *static_cast<Fiber*>(current); }
Block& block_of(int rank) { return machine->blocks[rank]; }
Block& own_block() { return block_of(self().rank); }

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }
std::string text(long long n) { return std::to_string(n); }

void wait(const std::function<bool()>& ready, const std::function<std::string()>& what) {
  if (ready()) return;
  self().ready = ready;
  self().what = what;
  swapcontext(&self().context, &machine->scheduler);
}

// Wait until `count` threads are here.
void meet(Meeting& meeting, int count, const std::function<std::string()>& what) {
  meeting.threads = count;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.times;
    ++machine->events;
  }
  const u32 mine = meeting.arrived ? meeting.times : meeting.times - 1;
  Meeting* const at = &meeting;
  wait([at, mine] { return at->times != mine; },
       [at, what] { return what() + ", where " + text(at->threads - at->arrived) + " are missing"; });
}

Block& living(int rank) {
  if (rank < 0 || rank >= machine->how.cluster) fail("there is no block " + text(rank));
  if (block_of(rank).running == 0) fail("block " + text(rank) + " has ended, and is still used");
  return block_of(rank);
}

unsigned char* memory_at(Block& block, u32 address, u32 bytes) {
  const long long at = (long long)address - FIRST_ADDRESS;
  if (at < 0 || at + bytes > machine->how.shared_bytes)
    fail("address " + text(at) + " is outside of " + text(machine->how.shared_bytes) +
         " bytes of shared memory");
  if (address % bytes) fail("address " + text(at) + " is no multiple of " + text(bytes));
  return block.memory + at;
}

template <class T>
T element_at(Block& block, u32 address) {
  T bits;
  std::memcpy(&bits, memory_at(block, address, sizeof bits), sizeof bits);
  return bits;
}

u32 swizzled(u32 address, u32 width = 128) {
  return address ^ (address >> 7 & width / 16 - 1) << 4;
}

}  // namespace
}  // namespace on_cpu
