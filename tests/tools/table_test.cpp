// SPDX-License-Identifier: Apache-2.0
#include <common/heat_map.hpp>
#include <common/table.hpp>
#include <common/terminal.hpp>

#include <limits>

#include <doctest/doctest.h>

using namespace kvpolicy;
using namespace kvpolicy::tools;

TEST_CASE("columns are aligned by characters, not bytes") {
  Table table;
  table.add_column("plan", "", Align::left);
  table.add_column("KV", "MB");
  table.add_row({"full", "33.56"});
  table.add_row({"é", "1"});
  CHECK(table.text() ==
        "  plan      KV\n"
        "            MB\n"
        "  ────   ─────\n"
        "  full   33.56\n"
        "  é          1\n");
  CHECK(table.markdown() == "| plan | KV MB |\n|---|---:|\n| full | 33.56 |\n| é | 1 |\n");
}

TEST_CASE("numbers have separators") {
  CHECK(thousands(0) == "0");
  CHECK(thousands(999) == "999");
  CHECK(thousands(1000) == "1,000");
  CHECK(thousands(1234567) == "1,234,567");
  CHECK(fixed(-1234.56, 1) == "-1,234.6");
  CHECK(fixed(-123.0, 0) == "-123");
  CHECK(fixed(std::numeric_limits<double>::quiet_NaN(), 1) == "-");
  CHECK(percent(0.981) == "98.1 %");
  CHECK(duration(3.21) == "3.2 s");
  CHECK(duration(250) == "4 min 10 s");
  CHECK(duration(3 * 3600 + 65) == "3 h 01 min");
}

TEST_CASE("characters that would break a line are escaped") {
  CHECK(one_line("a\nb\x1b[1m", 80) == "a\\nb\\x1b[1m");
  CHECK(one_line("abcdef", 3) == "abc…");
  CHECK(one_line("abc", 3) == "abc");
}

TEST_CASE("a heat map shades gates and frames the heads that keep all") {
  HeadGates gates{2, 2};
  gates(0, 0) = 1.0;
  gates(0, 1) = 0.3;
  gates(1, 0) = 0.5;
  gates(1, 1) = -0.1;
  const std::string map = heat_map(gates, head_kinds(gates, 0.5), false);
  CHECK(map ==
        "  KV head   0    1\n"
        "  layer  0 [██]  ░░    1 of 2\n"
        "  layer  1 [▒▒]  ··    1 of 2\n");
}
