// The page: loads what is known of the model, and opens the view for its kind of data.

import { getJson } from "./api.js";
import { showAbout } from "./about.js";
import { AudioView } from "./audio.js";
import { count } from "./dom.js";
import { ImageView } from "./image.js";
import { TextView } from "./text.js";

const VIEWS = {
  text: ["Write", TextView],
  bytes: ["Write", TextView],
  images: ["Complete", ImageView],
  audio: ["Listen", AudioView],
};

function showError(error) {
  const notice = document.getElementById("notice");
  notice.hidden = !error;
  notice.textContent = error ? error.message : "";
  if (error) notice.scrollIntoView({ block: "nearest" });
}

function openTab(name) {
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
}

function prepareTabs() {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const follow = () => {
    if (location.hash !== "#main") openTab(location.hash === "#about" ? "about" : "work"); // #main: within either.
  };
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => {
      history.replaceState(null, "", tab.id === "tab-about" ? "#about" : "#");
      follow();
    });
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = tabs[(index + by + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  }
  window.addEventListener("hashchange", follow);
  follow();
}

async function start() {
  prepareTabs();
  try {
    const about = await getJson("/page/about");
    const { samples } = await getJson("/page/samples");
    const [verb, View] = VIEWS[about.kind] ?? VIEWS.bytes;
    document.title = `${about.name} · Longstride`;
    const size = `${about.config[0][1]} parameters · context ${count(about.context, "byte")}`;
    document.getElementById("model").textContent = `${about.name} · a model of ${about.kind} · ${size}`;
    document.getElementById("tab-work").textContent = verb;
    showAbout(document.getElementById("about"), about);
    new View(document.getElementById("stage"), document.getElementById("look"), about, samples, showError);
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    showError(error);
  }
}

start();
