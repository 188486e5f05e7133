// SPDX-License-Identifier: Apache-2.0
//
// Goes over the pages of a cache without reading a row: to count them, or to move them elsewhere. What a
// policy lists for saving (state/archive.hpp) leads to all its storages, so a policy that can be saved
// needs nothing more to be visited.
#pragma once

#include <cstddef>

#include <kvpolicy/storage/page_table.hpp>

namespace kvpolicy {

/// Is shown each page table of a head, in an order that depends on nothing but the head's policy.
class PageVisitor {
 public:
  PageVisitor() = default;
  PageVisitor(const PageVisitor&) = delete;
  PageVisitor& operator=(const PageVisitor&) = delete;
  virtual ~PageVisitor() = default;

  /// The pages in use of one table, each of `page_bytes` bytes.
  virtual void visit(PageTable& table, std::size_t page_bytes) = 0;
  /// Whether `visit` puts other pages into tables. A table that forks own together is copied before.
  [[nodiscard]] virtual bool replaces() const { return false; }
};

}  // namespace kvpolicy
