// SPDX-License-Identifier: Apache-2.0
//
// What the library's values look like as text, for programs that print with fmt
// (https://fmt.dev, 9 or newer; target kvpolicy::format): plans, heads' settings, storage formats,
// byte counts and errors. For people and logs; what is to be read back is written by kvpolicy::io.
#pragma once

#include <kvpolicy/format/bytes.hpp>
#include <kvpolicy/format/error.hpp>
#include <kvpolicy/format/plan.hpp>
#include <kvpolicy/format/policy.hpp>
#include <kvpolicy/format/storage.hpp>
