// SPDX-License-Identifier: Apache-2.0
//
// Prints the library's values as text with fmt (https://fmt.dev, 9 or newer; target kvpolicy::format):
// plans, heads' settings, storage formats, byte counts and errors. The text is for people and logs;
// kvpolicy::io writes text that can be read back.
#pragma once

#include <kvpolicy/format/bytes.hpp>
#include <kvpolicy/format/error.hpp>
#include <kvpolicy/format/plan.hpp>
#include <kvpolicy/format/policy.hpp>
#include <kvpolicy/format/storage.hpp>
