// SPDX-License-Identifier: Apache-2.0
//
// Measures which part of the processor others took during a measurement, as Linux counts it: other
// processes, the system on their behalf, and the host of a virtual machine. If this is not near 0,
// the times are too long. On other systems the result is 0.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>
#include <string>

#include <sys/resource.h>
#include <unistd.h>

#include "samples.hpp"

namespace kvpolicy::bench {

class Neighbours {
 public:
  Neighbours() : start_{now()} {}

  /// Percent of all cores' time since construction. Linux counts hundredths of a second, so only
  /// long spans give a meaningful number.
  [[nodiscard]] double percent() const {
    const Spent end = now();
    const double others = (end.all - start_.all) - (end.own - start_.own);
    const double whole = seconds_since(begin_) * static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
    return whole > 0.0 ? std::clamp(100 * others / whole, 0.0, 100.0) : 0.0;
  }

 private:
  // Seconds of processor time since an arbitrary moment.
  struct Spent {
    double all = 0.0;
    double own = 0.0;
  };

  [[nodiscard]] static Spent now() {
    Spent spent;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime}) {
      spent.own += static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    }
    // cpu user nice system idle iowait irq softirq steal
    std::ifstream file{"/proc/stat"};
    std::string name;
    std::array<double, 8> ticks{};
    file >> name;
    for (double& number : ticks) file >> number;
    if (!file) return {.all = spent.own, .own = spent.own};
    const double busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7];
    spent.all = busy / static_cast<double>(sysconf(_SC_CLK_TCK));
    return spent;
  }

  Clock::time_point begin_ = Clock::now();
  Spent start_;
};

}  // namespace kvpolicy::bench
