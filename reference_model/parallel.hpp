// SPDX-License-Identifier: Apache-2.0
//
// How the CPU model divides its work among the threads of OpenMP. Without OpenMP all runs on the caller.
#pragma once

#include <cstddef>
#include <functional>

namespace kvpolicy::reference {

/// Calls work(first, count) for blocks of at most `block` items that cover [0, items), on several threads
/// if `threads` and the caller is not one of several threads already. The division into blocks does not
/// depend on the number of threads. @throws the first exception that `work` throws
void for_each_block(std::size_t items, std::size_t block, bool threads,
                    const std::function<void(std::size_t first, std::size_t count)>& work);

/// Calls work(first, count) for blocks of rows that cover [0, rows), on several threads if there
/// are many rows and a product takes one thread (one_thread_per_product), else all rows at once. `work` may
/// therefore multiply its rows by weights.
/// @throws the first exception that `work` throws
void for_each_row_block(std::size_t rows,
                        const std::function<void(std::size_t first, std::size_t count)>& work);

}  // namespace kvpolicy::reference
