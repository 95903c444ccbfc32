"use strict";
(() => {
  // Data reaches the page only as textContent: nothing in it can become markup.
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  let owner = null;
  let closing = 0;

  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const keyOf = (token) => token.dataset.t || token.id.slice(2);
  const tokenAt = (node) => {
    const token = node instanceof Element ? node.closest(".t") : null;
    return token && keyOf(token) in data.tokens ? token : null;
  };
  const textOf = (id) => data.texts[id];
  const format = (value) => {
    if (value === null) return "n/a";
    if (typeof value === "string") return value;
    return value === 0 ? "0" : value.toPrecision(5);
  };
  const signed = (value) => (value > 0 ? "+" : "") + format(value);
  const percent = (logprob) =>
    typeof logprob === "number" ? (100 * Math.exp(logprob)).toPrecision(3) + " %" : "n/a";

  const row = (cells, className) => {
    const line = element("tr", undefined, className);
    for (const cell of cells) line.append(element("td", cell));
    return line;
  };
  const table = (caption, headers) => {
    const made = element("table");
    made.append(element("caption", caption));
    const head = element("tr");
    for (const header of headers) head.append(element("th", header));
    made.append(head);
    return made;
  };
  const bestOf = (caption, forced, ids, logprobs) => {
    const made = table(caption, ["token", "logprob", "prob"]);
    ids.forEach((id, i) => {
      const cells = [textOf(id), format(logprobs[i]), percent(logprobs[i])];
      made.append(row(cells, id === forced ? "forced" : ""));
    });
    if (!ids.length) made.append(row(["n/a", "", ""]));
    return made;
  };

  const describe = (key) => {
    const [pair, sequence, step] = key.split("-");
    const [id, position, delta, lpA, lpB, rankA, rankB, change, margin, marginB, kl, phase,
      launch, idsA, topA, idsB, topB] = data.tokens[key];
    const [baseline, candidate] = data.pairs[pair];
    const where = ["position " + position, "sequence " + data.sequences[sequence], "step " + step];
    const ran = [phase === null ? "phase n/a" : phase];
    ran.push(launch === null ? "launch n/a"
      : "launch of " + launch[0] + " tokens, " + launch[1] + " requests, chunk from " + launch[2]);
    const forced = table("forced token", ["", "logprob", "prob", "rank"]);
    forced.append(row([baseline, format(lpA), percent(lpA), rankA === null ? "n/a" : rankA]));
    forced.append(row([candidate, format(lpB), percent(lpB), rankB === null ? "n/a" : rankB]));
    const sides = element("div", undefined, "sides");
    sides.append(
      bestOf(baseline + "'s best", id, idsA, topA), bestOf(candidate + "'s best", id, idsB, topB));
    tip.replaceChildren(
      element("span", "delta " + signed(delta) + " nats", "delta"),
      element("span", "\u00ab" + textOf(id) + "\u00bb", "name"),
      document.createTextNode(" id " + id),
      element("div", where.join(", "), "quiet"),
      element("div", "candidate: " + ran.join(", "), "quiet"),
      forced,
      element("div", "best token: " + change + ", margin " + format(margin) + " to "
        + format(marginB) + " nats; KL " + format(kl)),
      sides);
  };

  const place = (token) => {
    const around = token.getClientRects()[0] || token.getBoundingClientRect();
    const room = 8;
    const left = Math.min(around.left, innerWidth - tip.offsetWidth - room);
    const below = around.bottom + room;
    const fits = below + tip.offsetHeight < innerHeight;
    const top = fits ? below : Math.max(room, around.top - tip.offsetHeight - room);
    tip.style.left = Math.max(room, left) + "px";
    tip.style.top = top + "px";
  };
  const show = (token) => {
    clearTimeout(closing);
    if (owner) owner.removeAttribute("aria-describedby");
    owner = token;
    describe(keyOf(token));
    tip.hidden = false;
    token.setAttribute("aria-describedby", "tip");
    place(token);
  };
  const hide = () => {
    clearTimeout(closing);
    if (owner) owner.removeAttribute("aria-describedby");
    owner = null;
    tip.hidden = true;
  };
  const later = () => {
    clearTimeout(closing);
    // Long enough to move the pointer into the tip.
    closing = setTimeout(() => {
      const focused = tokenAt(document.activeElement);
      if (focused) show(focused); else hide();
    }, 150);
  };

  // A sequence is one stop of the Tab key; arrows move inside it.
  const focus = (token) => {
    const text = token.closest(".text");
    if (text) {
      for (const other of text.querySelectorAll("[tabindex]")) other.tabIndex = -1;
      token.tabIndex = 0;
    }
    token.focus({ preventScroll: false });
  };
  const tokensOf = (text) => [...text.querySelectorAll("[id^='t-']")];
  const move = (token, name) => {
    const text = token.closest(".text");
    if (!text) return false;
    const tokens = tokensOf(text);
    const at = tokens.indexOf(token);
    const targets = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 };
    if (!(name in targets)) return false;
    focus(tokens[Math.min(tokens.length - 1, Math.max(0, targets[name]))]);
    return true;
  };
  const link = (token) => {
    if (!token.id) return;
    try { history.replaceState(null, "", "#" + token.id); } catch { /* not allowed here */ }
  };
  const follow = () => {
    const token = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!token || !tokenAt(token)) return;
    token.scrollIntoView({ block: "center" });
    focus(token);
    show(token);
  };

  for (const text of document.querySelectorAll("div.text")) {
    const first = text.querySelector("[id^='t-']");
    if (first) first.tabIndex = 0;
  }
  document.addEventListener("pointerover", (event) => {
    const token = tokenAt(event.target);
    if (token) show(token);
    else if (tip.contains(event.target)) clearTimeout(closing);
    else if (!tip.hidden) later();
  });
  document.addEventListener("focusin", (event) => {
    const token = tokenAt(event.target);
    if (token) show(token);
  });
  document.addEventListener("focusout", later);
  document.addEventListener("click", (event) => {
    const token = tokenAt(event.target);
    if (token) { focus(token); show(token); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); return; }
    const token = tokenAt(event.target);
    if (!token) return;
    if (event.key === "Enter") link(token);
    else if (!event.altKey && !event.ctrlKey && !event.metaKey && move(token, event.key)) {
      event.preventDefault();
    }
  });
  addEventListener("scroll", () => { if (owner) place(owner); }, { passive: true });
  addEventListener("resize", hide);
  addEventListener("hashchange", follow);
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("figure details, details.prompt")) {
      details.open = true;
    }
  });
  follow();
})();
