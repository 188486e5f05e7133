// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about the CPU engine may use: a pool of threads of the caller.
// needs: cpu
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/duo.hpp>
#include <kvpolicy/kivi.hpp>
// each block
struct Pool {
  std::size_t size() const;
  template <class Body>
  void run(std::size_t count, const Body& body);
};
BLOCK
