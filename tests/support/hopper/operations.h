// What barriers, copies and products do to the state of a launch.

#pragma once

#include "machine.h"

namespace on_cpu {
namespace {

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
  const u32 bytes = copy.bytes.size();
  for (int rank = 0; rank < 16; ++rank) {
    if (!(copy.ranks >> rank & 1)) continue;
    Block& block = living(rank);
    Barrier& barrier = barrier_at(block, copy.barrier);
    if (!barrier.known) fail(name_of(block, copy.barrier) + " is not known to copies yet");
    for (u32 at = 0; at < bytes; at += 16)
      std::memcpy(memory_at(block, swizzled(copy.to + at, copy.width), 16), &copy.bytes[at], 16);
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

// The operand of 64 x 16 that the registers of a warp group are.
std::vector<float> operand_of(const std::vector<Fiber*>& threads, u64 group, size_t product) {
  std::vector<float> values(64 * 16);
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < 8; ++i) {
      const u32 both = threads[thread]->groups[group][product].registers[i / 2];
      const int line = 16 * (thread / 32) + thread % 32 / 4 + 8 * (i / 2 % 2);
      values[16 * line + 8 * (i / 4) + 2 * (thread % 4) + i % 2] = to_float(both >> 16 * (i % 2));
    }
  return values;
}

void compute(Block& block, const std::vector<Fiber*>& threads, u64 group) {
  for (size_t i = 0; i < threads[0]->groups[group].size(); ++i) {
    const Product first = threads[0]->groups[group][i];
    const std::vector<float> tall = first.registers
                                        ? operand_of(threads, group, i)
                                        : operand_of(block, first.tall, 64, first.turned);
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

}  // namespace
}  // namespace on_cpu
