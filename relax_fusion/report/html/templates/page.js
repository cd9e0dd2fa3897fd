"use strict";
(() => {
  const all = (query, inside = document) => [...inside.querySelectorAll(query)];
  const byId = (id) => document.getElementById(id);
  document.documentElement.classList.add("js");

  // --- Folding -----------------------------------------------------------------------------
  const folds = (open) => all("main details").forEach((fold) => { fold.open = open; });
  byId("open-all").addEventListener("click", () => folds(true));
  byId("close-all").addEventListener("click", () => folds(false));
  const reveal = (element) => {
    for (let at = element; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  };
  const follow = () => {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    if (target) { reveal(target); target.scrollIntoView(); }
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link && link.getAttribute("href") === location.hash) follow();
  });
  let opened = [];
  addEventListener("beforeprint", () => {  // kernels' texts are printed where they were open
    opened = all("main > :not(#sources) details:not([open])");
    opened.forEach((fold) => { fold.open = true; });
  });
  addEventListener("afterprint", () => { opened.forEach((fold) => { fold.open = false; }); });

  // --- Search ------------------------------------------------------------------------------
  const search = byId("search");
  const items = all(".item");
  const texts = new Map();
  const textOf = (item) => {
    if (!texts.has(item)) texts.set(item, `${item.id} ${item.textContent}`.toLowerCase());
    return texts.get(item);
  };
  const find = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let hits = 0;
    for (const item of items) {
      const hit = words.every((word) => textOf(item).includes(word));
      item.classList.toggle("off", !hit);
      hits += hit;
    }
    byId("found").textContent = words.length ? `${hits} of ${items.length}` : "";
  };
  search.addEventListener("input", find);

  // --- Keyboard ----------------------------------------------------------------------------
  let current = -1;
  const move = (by) => {
    const shown = items.filter((item) => !item.classList.contains("off"));
    if (!shown.length) return;
    const before = shown.indexOf(items[current]);
    const next = shown[Math.min(shown.length - 1, Math.max(0, before + by))];
    items.forEach((item) => item.classList.remove("at"));
    current = items.indexOf(next);
    next.classList.add("at");
    next.scrollIntoView({ block: "center" });
    const fold = next.querySelector(":scope > summary");
    if (fold) fold.focus({ preventScroll: true });
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && document.activeElement === search) {
      search.value = ""; find(); search.blur(); return;
    }
    if (event.target.matches("input, textarea")) return;
    const keys = {
      "/": () => search.focus(), j: () => move(1), k: () => move(-1),
      e: () => folds(true), c: () => folds(false),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });

  // --- What was chosen at some rows ---------------------------------------------------------
  const choices = JSON.parse(byId("choices").textContent);
  const body = byId("chosen-table").tBodies[0];
  const heads = all("th", byId("chosen-table")).map((head) => head.textContent);
  const cell = (row, text, style = "") => {
    const made = row.insertCell();
    made.dataset.head = heads[made.cellIndex];
    made.className = style;
    made.textContent = text;
    return made;
  };
  const named = (element, plan, how) => {
    for (const [text, style] of [[plan, "mono"], [how, "muted"]]) {
      const part = document.createElement("span");
      part.className = style;
      part.textContent = text;
      if (text) element.append(" ", part);
    }
  };
  const within = (upper, rows) => upper === null || rows <= upper;
  const choose = (rows) => {
    body.replaceChildren();
    for (const chain of choices) {
      const step = chain.steps.find(([upper]) => within(upper, rows));
      const range = chain.ranges.find(({ upper }) => within(upper, rows));
      const row = body.insertRow();
      const link = document.createElement("a");
      link.href = `#${chain.id}`;
      link.textContent = chain.title;
      const first = cell(row, "");
      first.append(link, document.createElement("br"));
      const where = document.createElement("span");
      where.className = "muted";
      where.textContent = chain.in;
      first.append(where);
      const [plan, how] = step ? step.slice(2) : range ? [range.plan, range.how] : ["–", ""];
      named(cell(row, ""), plan, how);
      cell(row, chain.fixed ? `its one size: ${chain.fixed}` : step ? step[1] : "–");
      named(cell(row, range ? range.size : "–"), range && range.plan !== plan ? range.plan : "", "");
      cell(row, range ? range.time : "–", "n strong");
      cell(row, range ? range.floor : "–", "n");
      cell(row, range ? range.bound : "–");
      const lost = cell(row, "");
      if (!range || !range.rejected.length) lost.textContent = "no other candidate on this page";
      else for (const [other, ways, time, more] of range.rejected) {
        const line = document.createElement("div");
        const cost = document.createElement("span");
        cost.textContent = `${time} (${more})`;
        line.append(cost);
        named(line, other, ways);
        lost.append(line);
      }
    }
  };
  const showRange = (fold, index) => {
    all(".range", fold).forEach((r) => r.classList.toggle("here", r.dataset.range === index));
    all(".tabs button", fold).forEach((b) => {
      b.classList.toggle("here", b.dataset.range === index);
      b.setAttribute("aria-pressed", b.dataset.range === index);
    });
  };
  const ranges = (rows) => {
    for (const fold of all(".candidates")) {
      const tabs = all(".tabs button", fold);
      const fits = (b) => b.dataset.upper === "" || rows <= Number(b.dataset.upper);
      if (tabs.length) showRange(fold, (tabs.find(fits) || tabs[tabs.length - 1]).dataset.range);
      else showRange(fold, "0");
    }
  };
  const input = byId("rows");
  const update = () => {
    const rows = Math.floor(Number(input.value));
    if (!(rows >= 1)) return;
    choose(rows);
    ranges(rows);
    all("#roofline circle[data-rows]").forEach((dot) => {
      dot.classList.toggle("now", Number(dot.dataset.rows) === rows);
    });
  };
  input.addEventListener("input", update);
  all(".tabs button").forEach((button) => {
    button.addEventListener("click", () => {
      showRange(button.closest(".candidates"), button.dataset.range);
    });
  });

  // --- Where the page is --------------------------------------------------------------------
  const links = new Map(all(".side a").map((a) => [a.getAttribute("href").slice(1), a]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.id);
      if (link && entry.isIntersecting) {
        links.forEach((other) => other.classList.remove("here"));
        link.classList.add("here");
      }
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  all("main section").forEach((section) => watch.observe(section));

  update();
  follow();
})();
