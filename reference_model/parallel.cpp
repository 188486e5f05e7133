// SPDX-License-Identifier: Apache-2.0
#include <reference_model/parallel.hpp>

#include <algorithm>
#include <exception>

#include <reference_model/library_product.hpp>

namespace kvpolicy::reference {

void for_each_block(std::size_t items, std::size_t block, bool threads,
                    const std::function<void(std::size_t first, std::size_t count)>& work) {
  std::exception_ptr failure;  // OpenMP lets no exception out of its loops
#pragma omp parallel for schedule(dynamic) if (threads && items > block)
  for (std::size_t first = 0; first < items; first += block) {
    try {
      work(first, std::min(block, items - first));
    } catch (...) {
#pragma omp critical(kvpolicy_block_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void for_each_row_block(std::size_t rows,
                        const std::function<void(std::size_t first, std::size_t count)>& work) {
  // Large enough for efficient products, small enough that other threads do not wait long for one
  // that lost its core for a while.
  constexpr std::size_t block = 64;
  if (!one_thread_per_product || rows < 4 * block) {
    work(0, rows);
    return;
  }
  for_each_block(rows, block, true, work);
}

}  // namespace kvpolicy::reference
