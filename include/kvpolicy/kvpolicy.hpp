// SPDX-License-Identifier: Apache-2.0
//
// Everything that needs only the standard library.
#pragma once

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/any_plan.hpp>
