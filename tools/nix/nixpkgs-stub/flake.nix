# SPDX-License-Identifier: MIT
{
  description = "The few nixpkgs names that the flake uses, as trivial derivations; see default.nix";

  outputs = { self }: { lib = import ./lib.nix; };
}
