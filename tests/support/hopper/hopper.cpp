// The parts of a Hopper GPU that the matmul kernel uses, on one thread of a CPU.
//
// Each thread of a cluster is a fiber, which runs until it waits.  Where none can go on, a copy
// arrives, or the kernel in front ends; where that is of no use, the launch has hung, and the error
// names what is waited for.  Products are computed as late as waits allow: whoever hands a stage
// back too early gets wrong numbers.  A warp group multiplies as one, so its products are there for
// all of its warps at once.

#include <sys/mman.h>

#include "schedule.h"

namespace on_cpu {

const char* launch(Launch& how, bool bfloat16, void (*kernel)(void**), void** arguments) {
  static std::string failure;
  Machine own{how, bfloat16, kernel, arguments, std::mt19937(how.seed), {}, {}, {}, {}, false, 0, {}, {}};
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

float to_float(u16 bits) { return to_float(bits, machine->bfloat16); }

float to_float(u16 bits, bool bfloat16) {
  const u32 sign = (u32)(bits & 0x8000) << 16;
  u32 wide = (u32)bits << 16;
  if (!bfloat16) {
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
  if ((u64)pointer % bytes) fail("bytes are moved at an address that is no multiple of their number");
  if (inside(own_block().memory, machine->how.shared_bytes)) return;
  for (int i = 0; i < machine->how.tensors; ++i)
    if (inside(machine->how.tensor[i].at, machine->how.tensor[i].bytes)) return;
  fail("bytes are moved that are neither of shared memory nor of a tensor");
}

void check_store(const void* pointer) {
  const u64 at = (u64)pointer;
  for (int i = 0; i < machine->how.outs; ++i) {
    const u64 out = (u64)machine->how.tensor[i].at;
    if (out <= at && at < out + machine->how.tensor[i].bytes && !machine->predecessor_ended)
      fail("a result is written before the kernel in front has ended");
  }
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

// Round the bits of a float32 to nearest, to the 10 bits of fraction of a tf32.
static u32 to_tf32(u32 bits) {
  const bool finite = (bits >> 23 & 255) != 255;
  return finite ? bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFFu : bits;
}

void start_copy(u32 to, const TensorMap& from, int k, int line, u32 barrier, u32 ranks) {
  Map map;
  std::memcpy(&map, &from, sizeof map);
  const u32 width = map.element_bytes * map.box_k;
  if (width != 32 && width != 64 && width != 128) fail("there is no swizzle as wide as the lines");
  if (to % (8 * width)) fail("a copy goes to an address where its swizzle does not begin");
  if (map.element_bytes * map.stride % 16) fail("lines of a tensor map are no multiples of 16 bytes");
  Copy copy{{}, to, barrier, ranks, width};
  const u64 size = map.element_bytes;
  for (u64 i = 0; i < map.box_lines; ++i)
    for (u64 j = 0; j < map.box_k; ++j) {
      u32 bits = 0;
      if (line + i < map.lines && k + j < map.k)
        std::memcpy(&bits, map.data + ((line + i) * map.stride + k + j) * size, size);
      if (map.rounds) bits = to_tf32(bits);
      const unsigned char* const first = (const unsigned char*)&bits;
      copy.bytes.insert(copy.bytes.end(), first, first + size);
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

void matrices(int count, bool store, bool columns, u32 address, u32& first, u32& second) {
  Lane& own = own_block().warps[self().warp].lanes[self().lane];
  own = {address, {first, second}};
  with_warp(store ? "stmatrix" : "ldmatrix", [count, store, columns](Warp& warp) {
    for (int matrix = 0; matrix < count; ++matrix) {
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

void move_words(bool store, bool together, const u32 (&addresses)[2], u32 (&words)[2]) {
  Lane& own = own_block().warps[self().warp].lanes[self().lane];
  own = {addresses[0], {words[0], words[1]}, addresses[1]};
  with_warp(store ? "st.shared" : "ld.shared", [store, together](Warp& warp) {
    // 64 bits of 16 lanes are moved at once, or 32 of all
    for (int part = 0; part < 2; ++part) {
      u32 banks = 0;
      for (int i = 0; i < 32; ++i) {
        Lane& lane = warp.lanes[i];
        const u32 at = part ? lane.next : lane.address;
        if (together && part == 0 && (at % 8 || lane.next != at + 4))
          fail("64 bits are moved at an address that is no multiple of 8");
        unsigned char* const there = memory_at(own_block(), at, 4);
        std::memcpy(store ? (void*)there : &lane.value[part],
                    store ? (void*)&lane.value[part] : there, 4);
        if (!together) banks |= 1u << at / 4 % 32;
      }
      if (together) {
        for (int i = 16 * part; i < 16 * part + 16; ++i) banks |= 3u << warp.lanes[i].address / 4 % 32;
      }
      machine->how.conflicts += ~banks != 0;
    }
  });
  words[0] = own.value[0];
  words[1] = own.value[1];
}

void start_product(void* sums, const char* type, int count, const u32* registers, u64 tall,
                   u64 wide, bool more, bool turned) {
  if (!self().fenced) fail("products begin without products_begin");
  self().begun.push_back({sums, type, count, registers, tall, wide, more, turned});
}

void commit_products() {
  self().fenced = false;
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

u32 load_from(u32 address, u32 rank) {
  u32 value;
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
