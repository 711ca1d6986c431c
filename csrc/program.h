// A list of operations and the threads that execute it.
#pragma once
#include <memory>
#include <string>

#include "abi.h"

namespace kvist {

const std::vector<const Kernels*>& all_kernels();     // built and supported by this machine, best first
const Kernels& kernels_named(const std::string& name);  // throws std::invalid_argument, listing what there is

// Which requests of a table begin with the same blocks.
void find_leaders(Table& table, int64_t requests);

class Program {
 public:
  Program(const Kernels& kernels, int threads) : kernels_(kernels), threads_(threads) {}
  void add(const Op& op) { ops_.push_back(op); }
  size_t size() const { return ops_.size(); }
  void run(const Step& step, size_t first, size_t last);

 private:
  const Kernels& kernels_;
  int threads_;
  std::vector<Op> ops_;
  Scratch common_;
  std::vector<Scratch> own_;
  std::unique_ptr<Phase[]> phases_;
};

// Bytes per second that `threads` threads read from `bytes` of memory, each its own part, summing whole cache lines.
double read_bandwidth(const uint8_t* data, size_t bytes, int threads, int passes);

}  // namespace kvist
