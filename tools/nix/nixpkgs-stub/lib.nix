# SPDX-License-Identifier: MIT
{
  genAttrs = names: f: builtins.listToAttrs (map (name: { inherit name; value = f name; }) names);
}
