// SPDX-License-Identifier: Apache-2.0
#include "attend.hpp"

namespace own {

Attended attend_native() { return attend(); }

}  // namespace own
