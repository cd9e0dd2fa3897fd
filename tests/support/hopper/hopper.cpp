// The parts of a Hopper GPU that the matmul kernel uses, on one thread of a CPU.
//
// Each thread of a cluster is a fiber, which runs until it waits.  Where none can go on, a copy
// arrives, or the kernel in front ends; where that is of no use, the launch has hung, and the error
// names what is waited for.  Products are computed as late as waits allow: whoever hands a stage
// back too early gets wrong numbers.  A warp group multiplies as one, so its products are there for
// all of its warps at once.

#define PRODUCT_LINES 0
#define PRODUCT_TURNED 0
#include "hopper.h"

#include <sys/mman.h>
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
  float* sums;
  int count;
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
  u32 address, value[2];
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
  std::vector<u16> elements;
  u32 to, barrier, ranks;
};

struct Map {  // what Python has written to a TensorMap
  const u16* data;
  u64 k, lines, box_k, box_lines, stride;  // `k` elements of a line, `stride` from line to line
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

u16 element_at(Block& block, u32 address) {
  u16 bits;
  std::memcpy(&bits, memory_at(block, address, 2), 2);
  return bits;
}

u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// --- barriers ---------------------------------------------------------------------------------

u64 mark_of(u32 address) { return 0xBA44133BA4413300ull ^ address; }

std::string name_of(Block& block, u32 address) {
  const int stages = machine->how.stages;
  const int index = std::distance(block.barriers.begin(), block.barriers.find(address));
  return (index < stages ? "full[" : "empty[") + text(index % stages) + "] of block " +
         text(&block - machine->blocks.data());
}

Barrier& barrier_at(Block& block, u32 address) {
  u64 mark;
  std::memcpy(&mark, memory_at(block, address, 8), 8);
  if (!block.barriers.count(address))
    fail("there is no barrier at address " + text(address - FIRST_ADDRESS));
  if (mark != mark_of(address)) fail(name_of(block, address) + " has been overwritten");
  return block.barriers[address];
}

void complete_if_all_is_there(Barrier& barrier) {
  if (barrier.missing == 0 && barrier.bytes == 0) {
    barrier.missing = barrier.arrivals;
    ++barrier.phase;
    ++machine->events;
  }
}

void count_arrival(Block& block, u32 address) {
  Barrier& barrier = barrier_at(block, address);
  if (barrier.missing == 0) fail("one arrival too many at " + name_of(block, address));
  --barrier.missing;
  complete_if_all_is_there(barrier);
}

// --- copies -----------------------------------------------------------------------------------

void land(const Copy& copy) {
  const u32 bytes = 2 * copy.elements.size();
  for (int rank = 0; rank < 16; ++rank) {
    if (!(copy.ranks >> rank & 1)) continue;
    Block& block = living(rank);
    Barrier& barrier = barrier_at(block, copy.barrier);
    if (!barrier.known) fail(name_of(block, copy.barrier) + " is not known to copies yet");
    for (u32 at = 0; at < bytes; at += 16)
      std::memcpy(memory_at(block, swizzled(copy.to + at), 16), &copy.elements[at / 2], 16);
    barrier.bytes -= bytes;
    complete_if_all_is_there(barrier);
  }
}

// --- products ---------------------------------------------------------------------------------

// The operand of `lines` x 16 that a matrix descriptor tells.
std::vector<float> operand_of(Block& block, u64 descriptor, int lines, bool turned = false) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
    fail("a descriptor has another layout than the swizzle of 128 bytes");
  const u32 start = (descriptor & 0x3FFF) << 4, eight_lines = (descriptor >> 32 & 0x3FFF) << 4;
  std::vector<float> values;
  for (int line = 0; line < lines; ++line)
    for (int k = 0; k < 16; ++k) {
      const int down = turned ? k : line, across = turned ? line : k;
      const u32 at = start + down / 8 * eight_lines + down % 8 * 128 + 2 * across;
      values.push_back(to_float(element_at(block, swizzled(at))));
    }
  return values;
}

void compute(Block& block, const std::vector<Fiber*>& threads, u64 group) {
  for (size_t i = 0; i < threads[0]->groups[group].size(); ++i) {
    const Product first = threads[0]->groups[group][i];
    const std::vector<float> tall = operand_of(block, first.tall, 64, first.turned);
    const std::vector<float> wide = operand_of(block, first.wide, 2 * first.count);
    for (int thread = 0; thread < 128; ++thread) {
      const std::vector<Product>& own = threads[thread]->groups[group];
      if (own.size() <= i || own[i].tall != first.tall || own[i].wide != first.wide ||
          own[i].more != first.more)
        fail("threads of a warp group multiply different operands");
      for (int j = 0; j < first.count; ++j) {
        const int row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (j / 2 % 2);
        const int column = 8 * (j / 4) + 2 * (thread % 4) + j % 2;
        float sum = first.more ? own[i].sums[j] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += tall[16 * row + k] * wide[16 * column + k];
        own[i].sums[j] = sum;
      }
    }
  }
}

// --- one launch -------------------------------------------------------------------------------

void begin() {
  try {
    machine->kernel(machine->arguments);
  } catch (const std::exception& error) {
    machine->failure = error.what();
  }
  self().done = true;
  --own_block().running;
}

void end_predecessor() {
  for (int number = 0; number < machine->how.outs; ++number) {
    const Tensor& out = machine->how.tensor[number];
    for (u64 i = 0; i < out.bytes / 2; ++i)
      if (static_cast<const u16*>(out.at)[i] != UNWRITTEN)
        fail("results are written before the kernel in front has ended");
  }
  for (int i = 0; i < machine->how.tensors; ++i) {
    const Tensor& tensor = machine->how.tensor[i];
    if (tensor.after) std::memcpy(tensor.at, tensor.after, tensor.bytes);
  }
  machine->predecessor_ended = true;
}

// Let something happen without which no thread can go on.
bool something_happens() {
  std::vector<Copy>& copies = machine->copies;
  if (!copies.empty()) {
    const size_t at = machine->random() % copies.size();
    const Copy landing = copies[at];
    copies.erase(copies.begin() + at);
    land(landing);
    return true;
  }
  for (const Fiber& fiber : machine->fibers)
    if (!fiber.done && fiber.for_predecessor && !machine->predecessor_ended) {
      end_predecessor();
      return true;
    }
  return false;
}

[[noreturn]] void tell_who_waits() {
  std::map<std::string, int> waiting;
  for (Fiber& fiber : machine->fibers)
    if (!fiber.done) ++waiting[(current = &fiber, fiber.what())];
  std::string all = "no thread can go on:";
  for (const auto& [what, threads] : waiting) all += "\n  " + text(threads) + " wait for " + what;
  fail(all);
}

// Put some blocks, warp groups and warps in front of others, which only run when those wait.
void shuffle(std::vector<Fiber*>& order) {
  u32 salt[3];
  for (u32& one : salt) one = machine->random() % 2 ? machine->random() : 0;
  const auto key = [&salt](const Fiber* f) {
    const u32 places[3] = {(u32)f->rank, f->rank * 8u + f->warp / 4, f->rank * 32u + f->warp};
    std::vector<u32> keys;
    for (int i = 0; i < 3; ++i) keys.push_back(salt[i] * (2 * places[i] + 1) >> 8);
    return keys;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&key](const Fiber* a, const Fiber* b) { return key(a) < key(b); });
}

// Let a thread run until it waits; tell whether it could.
bool step(Fiber* fiber) {
  current = fiber;
  if (fiber->done || (fiber->ready && !fiber->ready())) return false;
  swapcontext(&machine->scheduler, &fiber->context);
  if (!machine->failure.empty()) fail(machine->failure);
  return true;
}

void run_until_all_have_ended() {
  const u32 seed = machine->how.seed;
  std::vector<Fiber*> order;
  for (Fiber& fiber : machine->fibers) order.push_back(&fiber);
  if (seed) shuffle(order);
  for (;;) {
    bool moved = false;
    for (size_t i = 0, events = machine->events; i < order.size(); ++i) {
      moved |= step(order[i]);
      if (seed && machine->events != events) break;  // to those in front again
    }
    if (seed && machine->random() % 512 == 0) shuffle(order);
    if (moved) continue;
    if (std::all_of(order.begin(), order.end(), [](Fiber* f) { return f->done; })) break;
    if (!something_happens()) tell_who_waits();
  }
  if (!machine->copies.empty()) fail("blocks have ended before their copies have arrived");
}

void start_cluster(int cluster, unsigned char* stacks, unsigned char* memory) {
  const Launch& how = machine->how;
  machine->fibers = std::vector<Fiber>(how.cluster * how.threads);
  machine->blocks = std::vector<Block>(how.cluster);
  machine->cluster = {};
  for (int rank = 0; rank < how.cluster; ++rank) {
    Block& block = block_of(rank);
    block.memory = memory + rank * (how.shared_bytes + 1023ull) / 1024 * 1024;
    std::memset(block.memory, 0xFF, how.shared_bytes);  // NaN
    block.running = how.threads;
    block.warps.resize(how.threads / 32);
    block.computed.resize(how.threads / 128);
  }
  for (size_t i = 0; i < machine->fibers.size(); ++i) {
    Fiber& fiber = machine->fibers[i];
    const unsigned rank = i / how.threads, thread = i % how.threads;
    fiber.thread = {thread};
    fiber.block = {cluster * how.cluster + rank};
    fiber.grid = {(unsigned)(how.clusters * how.cluster)};
    fiber.rank = rank;
    fiber.warp = thread / 32;
    fiber.lane = thread % 32;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = &machine->scheduler;
    makecontext(&fiber.context, begin, 0);
  }
}

void run_all(unsigned char* stacks, unsigned char* memory) {
  std::vector<int> clusters;
  for (int i = 0; i < machine->how.clusters; ++i) clusters.push_back(i);
  if (machine->how.seed) std::shuffle(clusters.begin(), clusters.end(), machine->random);
  for (const int cluster : clusters) {
    start_cluster(cluster, stacks, memory);
    run_until_all_have_ended();
  }
  if (!machine->predecessor_ended) fail("the kernel does not wait for the one in front");
}

}  // namespace

const char* launch(Launch& how, bool bfloat16, void (*kernel)(void**), void** arguments) {
  static std::string failure;
  Machine own{how, bfloat16, kernel, arguments, std::mt19937(how.seed)};
  own.predecessor_ended = !how.dependent;
  machine = &own;
  how.conflicts = 0;
  const u64 room = how.shared_bytes / 1024 * 1024 + 1024;
  const u64 bytes = how.cluster * (room + how.threads * STACK_BYTES);
  void* const all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return "no memory for the stacks of all threads";
  failure.clear();
  try {
    run_all((unsigned char*)all + how.cluster * room, (unsigned char*)all);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  munmap(all, bytes);
  return failure.empty() ? nullptr : failure.c_str();
}

float to_float(u16 bits) {
  const u32 sign = (u32)(bits & 0x8000) << 16;
  u32 wide = (u32)bits << 16;
  if (!machine->bfloat16) {
    const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp((float)fraction, -24);
    wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  }
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

u16 to_bits(float value) {  // to nearest, ties to even
  if (std::isnan(value)) return 0x7FFF;
  const float size = std::fabs(value);
  u32 wide;
  std::memcpy(&wide, &size, 4);
  const u16 sign = std::signbit(value) ? 0x8000 : 0;
  if (machine->bfloat16) return sign | (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < std::ldexp(1.0f, -14)) return sign | (u16)std::nearbyint(std::ldexp(size, 24));
  return sign | (wide - (112 << 23) + 0xFFF + (wide >> 13 & 1)) >> 13;
}

unsigned char* shared_memory() { return own_block().memory; }

u32 address_of(const void* pointer) {
  return (const unsigned char*)pointer - own_block().memory + FIRST_ADDRESS;
}

void check_access(const void* pointer, u64 bytes) {
  const unsigned char* const first = (const unsigned char*)pointer;
  const auto inside = [&](const void* from, u64 size) {
    return first >= from && first + bytes <= (const unsigned char*)from + size;
  };
  if ((u64)pointer % bytes) fail("16 bytes are moved at an address that is no multiple of 16");
  if (inside(own_block().memory, machine->how.shared_bytes)) return;
  for (int i = 0; i < machine->how.tensors; ++i)
    if (inside(machine->how.tensor[i].at, machine->how.tensor[i].bytes)) return;
  fail("16 bytes are moved that are neither of shared memory nor of a tensor");
}

void sync_threads(int name, int threads) {
  meet(own_block().meetings[name], threads ? threads : machine->how.threads, [name] {
    return "threads_sync(" + text(name) + ") of block " + text(self().rank);
  });
}

void arrive_threads(int name, int threads) {
  Meeting& meeting = own_block().meetings[name];
  meeting.threads = threads;
  if (++meeting.arrived < threads) return;
  meeting.arrived = 0;
  ++meeting.times;
  ++machine->events;
}

// All lanes of a warp come; the last does what they came for.
static void with_warp(const char* what, const std::function<void(Warp&)>& act) {
  Warp& warp = own_block().warps[self().warp];
  if (warp.meeting.arrived && std::strcmp(warp.what, what) != 0)
    fail(std::string("lanes of a warp are at ") + what + " and " + warp.what);
  warp.what = what;
  if (warp.meeting.arrived == 31) act(warp);
  meet(warp.meeting, 32, [what] { return std::string(what) + " of a warp"; });
}

void sync_warp() { with_warp("__syncwarp", [](Warp&) {}); }

void arrive(u32 barrier, int rank) {
  Block& block = living(rank);
  if (rank != own_rank() && !barrier_at(block, barrier).known)
    fail(name_of(block, barrier) + " is not known to other blocks yet");
  count_arrival(block, barrier);
}

void start_copy(u32 to, const TensorMap& from, int k, int line, u32 barrier, u32 ranks) {
  Map map;
  std::memcpy(&map, &from, sizeof map);
  if (2 * map.box_k != 128) fail("lines of a box are not as wide as the swizzle");
  if (to % 128) fail("a copy goes to an address that is no multiple of 128");
  Copy copy{{}, to, barrier, ranks};
  for (u64 i = 0; i < map.box_lines; ++i)
    for (u64 j = 0; j < map.box_k; ++j) {
      const bool inside = line + i < map.lines && k + j < map.k;
      copy.elements.push_back(inside ? map.data[(line + i) * map.stride + k + j] : 0);
    }
  if (machine->how.late) {
    machine->copies.push_back(copy);
  } else {
    land(copy);
  }
}

int own_rank() { return self().rank; }

void change_registers(int count, bool more) {
  const int own = REGISTERS / machine->how.blocks / machine->how.threads / 8 * 8;
  if (more ? count < own : count > own)
    fail("a thread has " + text(own) + " registers, and cannot come to " + text(count));
  int& left = own_block().free_registers;
  wait([&left, own, count] { return left >= count - own; }, [] { return "registers"; });
  left -= count - own;
  ++machine->events;
}

void matrices(bool store, bool columns, u32 address, u32& first, u32& second) {
  Lane& own = own_block().warps[self().warp].lanes[self().lane];
  own = {address, {first, second}};
  with_warp(store ? "stmatrix" : "ldmatrix", [store, columns](Warp& warp) {
    for (int matrix = 0; matrix < 2; ++matrix) {
      u32 banks = 0;
      for (int i = 0; i < 8; ++i) banks |= 1 << (warp.lanes[8 * matrix + i].address / 16 % 8);
      machine->how.conflicts += banks != 255;
      for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) {
          const int across = 2 * (lane % 4) + half, down = lane / 4;
          const int row = columns ? across : down, column = columns ? down : across;
          unsigned char* const at = memory_at(own_block(), warp.lanes[8 * matrix + row].address, 16);
          u32& value = warp.lanes[lane].value[matrix];
          u16 bits = value >> 16 * half;
          if (store) {
            std::memcpy(at + 2 * column, &bits, 2);
          } else {
            std::memcpy(&bits, at + 2 * column, 2);
            value = (value & (half ? 0xFFFFu : 0xFFFF0000u)) | (u32)bits << 16 * half;
          }
        }
    }
  });
  first = own.value[0];
  second = own.value[1];
}

void start_product(float* sums, int count, u64 tall, u64 wide, bool more, bool turned) {
  if (!self().fenced) fail("products begin without products_begin");
  self().begun.push_back({sums, count, tall, wide, more, turned});
}

void commit_products() {
  self().groups.push_back(self().begun);
  self().begun.clear();
}

void wait_for_products(int but) {
  Block& block = own_block();
  const int group = self().warp / 4;
  const u64 committed = self().groups.size(), wanted = committed - std::min<u64>(but, committed);
  std::vector<Fiber*> threads;
  for (int i = 0; i < 128; ++i)
    threads.push_back(&machine->fibers[self().rank * machine->how.threads + group * 128 + i]);
  wait(
      [threads, wanted] {
        return std::all_of(threads.begin(), threads.end(),
                           [wanted](Fiber* f) { return f->groups.size() >= wanted; });
      },
      [group] {
        return "products of warp group " + text(group) + " of block " + text(self().rank);
      });
  for (; block.computed[group] < wanted; ++block.computed[group], ++machine->events)
    compute(block, threads, block.computed[group]);
  if (but == 0) self().fenced = false;
}

}  // namespace on_cpu

using namespace on_cpu;

void barrier_init(u32 barrier, u32 arrivals) {
  Block& block = own_block();
  const u64 mark = mark_of(barrier);
  std::memcpy(memory_at(block, barrier, 8), &mark, 8);
  if (!block.barriers.insert({barrier, {(int)arrivals, (int)arrivals}}).second)
    fail(name_of(block, barrier) + " is initialised twice");
}

void barriers_ready() {
  for (auto& [address, barrier] : own_block().barriers) barrier.known = true;
}

void barrier_expect(u32 barrier, u32 bytes) {
  barrier_at(own_block(), barrier).bytes += bytes;
  count_arrival(own_block(), barrier);
}

void barrier_wait(u32 barrier, u32 parity) {
  Block& block = own_block();
  Barrier& at = barrier_at(block, barrier);
  wait([&at, parity] { return (at.phase & 1) != parity; },
       [&at, &block, barrier, parity] {
         return name_of(block, barrier) + ", parity " + text(parity) + ", where " +
                text(at.missing) + " arrivals and " + text(at.bytes) + " bytes are missing";
       });
}

void cluster_sync() {
  int running = 0;
  for (const Block& block : machine->blocks) running += block.running;
  meet(machine->cluster, running, [] { return "cluster_sync"; });
}

float load_from(u32 address, u32 rank) {
  float value;
  std::memcpy(&value, memory_at(living(rank), address, 4), 4);
  return value;
}

void wait_for_predecessor() {
  self().for_predecessor = true;
  wait([] { return machine->predecessor_ended; },
       [] { return std::string("the kernel in front"); });
}

void release_successor() {
  if (!machine->predecessor_ended) fail("the next kernel begins before the one in front has ended");
}

void products_begin() { self().fenced = true; }
