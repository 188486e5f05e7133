// SPDX-License-Identifier: Apache-2.0
int first();
int second();

int main() { return first() == second() ? 0 : 1; }
