// SPDX-License-Identifier: Apache-2.0
//
// An enumeration must be printed by its name_of; its number would not help the reader of an error.
// expect: a part of a message is text, a character, a number or an address
#include <string>

#include <kvpolicy/core/error.hpp>

enum class Colour { red };

std::string colour();
std::string colour() { return kvpolicy::message("the colour is ", Colour::red); }
