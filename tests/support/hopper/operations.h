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

constexpr int SLICE_BYTES = 32;  // of k

int bytes_of(const std::string& type) { return type == "tf32" ? 4 : type[1] == '8' ? 1 : 2; }

// An element as a number; of float32 the bits that tf32 has not are dropped.
double number_at(Block& block, u32 address, const std::string& type) {
  if (type == "s8") return element_at<signed char>(block, address);
  if (type == "u8") return element_at<unsigned char>(block, address);
  if (type != "tf32") return to_float(element_at<u16>(block, address), type == "bf16");
  const u32 bits = element_at<u32>(block, address) & ~0x1FFFu;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The operand of some lines x 32 bytes that a matrix descriptor tells.
std::vector<double> operand_of(Block& block, u64 descriptor, int lines, const std::string& type,
                               bool turned = false) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
    fail("a descriptor has another layout than the swizzle of 128 bytes");
  const u32 start = (descriptor & 0x3FFF) << 4, eight_lines = (descriptor >> 32 & 0x3FFF) << 4;
  const int bytes = bytes_of(type);
  std::vector<double> values;
  for (int line = 0; line < lines; ++line)
    for (int k = 0; k < SLICE_BYTES / bytes; ++k) {
      const int down = turned ? k : line, across = turned ? line : k;
      const u32 at = start + down / 8 * eight_lines + down % 8 * 128 + bytes * across;
      values.push_back(number_at(block, swizzled(at), type));
    }
  return values;
}

// Add products of `depth` elements of k to a sum.
template <class T>
T added_to(T sum, const double* tall, const double* wide, int depth) {
  for (int k = 0; k < depth; ++k) sum += (T)tall[k] * (T)wide[k];
  return sum;
}

// The operand of 64 x 16 that the registers of a warp group are.
std::vector<double> operand_of(const std::vector<Fiber*>& threads, u64 group, size_t product) {
  std::vector<double> values(64 * 16);
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
      const std::vector<double> tall =
          first.registers ? operand_of(threads, group, i)
                          : operand_of(block, first.tall, 64, first.type, first.turned);
      const std::vector<double> wide = operand_of(block, first.wide, 2 * first.count, first.type);
      const int depth = SLICE_BYTES / bytes_of(first.type);
    for (int thread = 0; thread < 128; ++thread) {
      const std::vector<Product>& own = threads[thread]->groups[group];
      if (own.size() <= i || own[i].tall != first.tall || own[i].wide != first.wide ||
          own[i].more != first.more)
        fail("threads of a warp group multiply different operands");
      for (int j = 0; j < first.count; ++j) {
        const int row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (j / 2 % 2);
        const int column = 8 * (j / 4) + 2 * (thread % 4) + j % 2;
        const double *at_row = &tall[depth * row], *at_column = &wide[depth * column];
        if (first.type[1] == '8') {  // integers
          int& sum = static_cast<int*>(own[i].sums)[j];
          sum = added_to(first.more ? sum : 0, at_row, at_column, depth);
        } else {
          float& sum = static_cast<float*>(own[i].sums)[j];
          sum = added_to(first.more ? sum : 0.0f, at_row, at_column, depth);
        }
      }
    }
  }
}

}  // namespace
}  // namespace on_cpu
