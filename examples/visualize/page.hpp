// SPDX-License-Identifier: Apache-2.0
//
// A recording as one HTML page that needs nothing else: no network, no other file. page/page.html
// is its frame; page/page.css and the scripts beside go into it when the tool is built, the recording
// when it is written: as JSON with one block of bytes, whose layout stands in page.cpp.
#pragma once

#include <cstddef>
#include <string>

#include "recording.hpp"

namespace kvpolicy::tools {

struct HtmlPage {
  std::string html;
  float least_shown = 0;  ///< attention below this share of a query's is not in the page
};

/// Attention is what grows with heads, steps and rows: its smallest shares are left out until the
/// page has no more than `most_bytes`; what is left then may still be more.
[[nodiscard]] HtmlPage write_page(const Recording& recording, std::size_t most_bytes = 1'900'000);

/// The name of a head's policy and the bits of its quantised rows, 0 where there are none.
struct HeadKind {
  std::string policy;
  std::size_t bits = 0;
  friend bool operator==(const HeadKind&, const HeadKind&) = default;
};
[[nodiscard]] HeadKind kind_of(const HeadSettings<bfloat16>& config);

}  // namespace kvpolicy::tools
