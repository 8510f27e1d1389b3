#!/bin/sh
# Debian's packages for the lab, where this is root with apt-get; else nothing, and the lab's tests say what is missing.
# Never fails: a machine without a network still runs every other test. No sshd is started, now or at boot.
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
missing=""
command -v pdsh >/dev/null || missing="$missing pdsh"
command -v ip >/dev/null || missing="$missing iproute2"
[ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
[ -n "$missing" ] || exit 0
echo "the lab of tests/cluster needs$missing: apt-get install"

policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  trap 'exit 0' INT TERM
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y --no-install-recommends $missing >/dev/null 2>&1; }
install || { apt-get update >/dev/null 2>&1 && install; } || echo "apt-get could not install them; tests/cluster will skip"
case "$missing" in *openssh-server*) [ -x /usr/sbin/sshd ] && update-rc.d ssh disable >/dev/null 2>&1 ;; esac
exit 0
