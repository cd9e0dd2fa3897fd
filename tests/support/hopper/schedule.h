// Which thread runs next, and what happens where none can.

#pragma once

#include "operations.h"

namespace on_cpu {
namespace {

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
}  // namespace on_cpu
